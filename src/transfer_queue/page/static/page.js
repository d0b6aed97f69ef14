// What HTMX does not do for the page: the map on a canvas, its keyboard, the colours, the dialog of a row, and to say that
// the page's own process does not answer.
"use strict";

const LANE = 36, CELL = 26;      // px of a lane, and of what is drawn in it
const SILENT_MS = 4000;          // the page's own process says something every second
const AGAIN_MS = 2000;
const SILENT = "The page's own process does not answer.";
const by = id => document.getElementById(id);
const whole = new Intl.NumberFormat("en");

let cellMap = null, cursor = 0;
let heardAt = Date.now(), isConnected = true, isStale = false;

// ---- the map ----

function style(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function ramp(from, to) {
  const parts = text => [1, 3, 5].map(at => parseInt(text.slice(at, at + 2), 16));
  const [a, b] = [parts(from), parts(to)];
  return Array.from({ length: 256 }, (_, at) => {
    const share = at ? 0.22 + 0.78 * at / 255 : 0;  // a run with anything in it differs from an empty one
    return `rgb(${a.map((value, i) => Math.round(value + (b[i] - value) * share)).join()})`;
  });
}

function unpacked(text) { return Uint8Array.from(atob(text), one => one.charCodeAt(0)); }

function newMap(found) {
  if (found) {
    for (const name of ["written", "consumed", "leased"]) found[name] = found[name].map(unpacked);
    cursor = cellMap && cellMap.id === found.id ? Math.min(cursor, Math.max(0, found.runs - 1)) : 0;
  }
  cellMap = found;
  paint();
}

function paint() {
  const lanes = cellMap ? cellMap.fields.length + cellMap.tasks.length : 0, runs = cellMap ? cellMap.runs : 0;
  by("map").hidden = by("under").hidden = !runs || !lanes;  // before it is measured
  const canvas = by("cells"), scale = devicePixelRatio || 1, width = canvas.parentElement.clientWidth;
  canvas.style.height = lanes * LANE + "px";
  canvas.width = Math.round(width * scale); canvas.height = Math.round(lanes * LANE * scale);
  if (!runs || !lanes) return;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const empty = style("--empty"), step = width / runs, gap = step >= 7 ? 1 : 0;
  const blue = ramp(empty, style("--written")), green = ramp(empty, style("--consumed")), amber = ramp(empty, style("--leased"));
  const line = (at, colours) => {
    const top = at * LANE + (LANE - CELL) / 2;
    for (let run = 0; run < runs; run += 1) {
      const left = Math.round(run * step * scale) / scale, right = Math.round((run + 1) * step * scale) / scale;
      pen.fillStyle = colours(run);
      pen.fillRect(left, top, Math.max(1 / scale, right - left - gap), CELL);
    }
  };
  cellMap.fields.forEach((_, at) => line(at, run => blue[cellMap.written[at][run]]));
  cellMap.tasks.forEach((_, at) => line(cellMap.fields.length + at, run => {
    const [used, lent] = [cellMap.consumed[at][run], cellMap.leased[at][run]];
    return lent > used ? amber[lent] : green[used];
  }));
  pen.strokeStyle = style("--text"); pen.lineWidth = 1.5;
  if (document.activeElement === canvas || canvas.matches(":hover")) pen.strokeRect(cursor * step + 0.75, 1, Math.max(3, step - 1.5), lanes * LANE - 2);
  say();
}

function say() {
  const canvas = by("cells"), first = cellMap.first_rows[cursor];
  const share = (names, lines, word) => names.map((name, at) => [name, lines[at][cursor]]).filter(([, value]) => value)
    .map(([name, value]) => name + " " + word + (value === 255 ? "" : " " + Math.max(1, Math.round(100 * value / 255)) + " %"));
  const words = [...share(cellMap.fields, cellMap.written, "written"), ...share(cellMap.tasks, cellMap.consumed, "consumed"), ...share(cellMap.tasks, cellMap.leased, "leased")];
  const text = (cellMap.each > 1 ? whole.format(cellMap.each) + " rows from #" : "row #") + first + ": " + (words.join(", ") || "nothing yet");
  canvas.setAttribute("aria-valuemax", cellMap.runs);
  canvas.setAttribute("aria-valuenow", cursor + 1);
  canvas.setAttribute("aria-valuetext", text);
  by("under").textContent = text;
}

function move(to) {
  if (!cellMap || !cellMap.runs) return;
  cursor = Math.max(0, Math.min(cellMap.runs - 1, to));
  paint();
}

function runAt(event) { return Math.floor(event.offsetX / Math.max(1, by("cells").clientWidth) * cellMap.runs); }

function openHere() { if (cellMap && cellMap.runs) openRow(cellMap.first_rows[cursor]); }

function listenToMap() {
  const canvas = by("cells");
  canvas.onpointermove = event => { if (cellMap) move(runAt(event)); };
  canvas.onpointerleave = canvas.onblur = canvas.onfocus = () => paint();
  canvas.onclick = event => { if (cellMap) { move(runAt(event)); openHere(); } };
  canvas.onkeydown = event => {
    const page = cellMap ? Math.max(1, Math.round(cellMap.runs / 10)) : 1;
    const to = { ArrowLeft: cursor - 1, ArrowDown: cursor - 1, ArrowRight: cursor + 1, ArrowUp: cursor + 1, PageDown: cursor - page, PageUp: cursor + page, Home: 0, End: Infinity }[event.key];
    if (to !== undefined) { event.preventDefault(); move(to); }
    else if (event.key === "Enter" || event.key === " ") { event.preventDefault(); openHere(); }
  };
  document.addEventListener("map", event => newMap(JSON.parse(event.detail.data)));
  addEventListener("resize", () => paint());
}

// ---- one row ----

function openRow(row) { htmx.ajax("GET", `row?partition=${cellMap.id}&row=${row}`, { source: by("cells") }); }

function inRow(title, kind, text) {
  const said = document.createElement("p");
  said.className = kind;
  said.textContent = text;
  if (title) by("row-title").textContent = title;
  by("row-body").replaceChildren(said);
}

function isOfRow(event) { return event.detail.ctx && event.detail.ctx.target === by("row"); }

function listenToRow() {
  const dialog = by("row");
  document.addEventListener("htmx:before:request", event => {
    if (!isOfRow(event) || dialog.open) return;
    inRow("Row", "soft", "…");
    dialog.showModal();
    by("row-close").focus();
  });
  document.addEventListener("htmx:error", event => { if (isOfRow(event)) inRow("", "trouble", SILENT); });
  dialog.onclick = event => { if (event.target === dialog) dialog.close(); };
  dialog.addEventListener("error", event => {  // does not bubble
    event.target.replaceWith(`no ${event.target.alt} can be made`);
  }, true);
}

// ---- events ----

function connect() {
  const stream = by("stream");
  if (!stream) location.reload();
  // Another element: the events of one that stays where it is would go on, too.
  else htmx.swap({ text: stream.outerHTML, target: stream, swap: "outerHTML", sourceElement: stream });
}

function watch() {
  if (document.hidden || Date.now() - heardAt < SILENT_MS) return;
  by("status").className = "status bad";
  by("status").textContent = "no page";
  by("trouble").hidden = false;
  by("trouble").textContent = SILENT + " Is it still running?";
  heardAt = Date.now() - SILENT_MS + AGAIN_MS;
  connect();
}

function listenToEvents() {
  const heard = () => { heardAt = Date.now(); };
  document.addEventListener("htmx:sse:before:message", heard);
  document.addEventListener("htmx:sse:before:connection", event => { if (document.hidden) event.preventDefault(); });
  document.addEventListener("htmx:sse:after:connection", () => { isConnected = true; heard(); });
  document.addEventListener("htmx:sse:close", () => { isConnected = false; });
  document.addEventListener("visibilitychange", () => {
    heard();
    if (!document.hidden && !isConnected) connect();
  });
  const reload = answered => { if (answered === 401) location.reload(); };  // a page that was started anew wants its token
  document.addEventListener("htmx:response:error", event => reload(event.detail.ctx.response.status));
  document.addEventListener("htmx:sse:error", event => reload(event.detail.status));
  // The list of partitions stays as it is while somebody chooses, and is sent once more then.
  const isInUse = one => one.target && one.target.id === "partition" && one.target === document.activeElement;
  document.addEventListener("htmx:before:swap", event => {
    const at = event.detail.tasks.findIndex(isInUse);
    if (at < 0) return;
    event.detail.tasks.splice(at, 1);
    isStale = true;
  });
  by("partition").parentElement.addEventListener("focusout", () => {
    if (isStale) connect();
    isStale = false;
  });
  setInterval(watch, 1000);
}

function theme(dark) {
  document.documentElement.classList.toggle("dark", dark);
  paint();
}

function begin() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let own = null;
  theme(system.matches);
  system.addEventListener("change", () => { if (own == null) theme(system.matches); });
  by("theme").onclick = () => { own = !document.documentElement.classList.contains("dark"); theme(own); };
  listenToMap();
  listenToRow();
  listenToEvents();
}

begin();
