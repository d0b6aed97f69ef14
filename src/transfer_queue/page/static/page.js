// The page of a running service. Whatever comes from the service is set as text, never as markup.
"use strict";

const LANE = 36, CELL = 26;      // px of a lane, and of what is drawn in it
const HISTORY = 240;             // looks that the small charts remember: two minutes
const SILENT_MS = 4000;          // the page's own process says something every second
const by = id => document.getElementById(id);
const whole = new Intl.NumberFormat("en");

let stream = null, chosen = location.hash.slice(1), heardAt = 0, cellMap = null, cursor = 0, opened = null;
let history = { written: [], used: [], partition: "" };
const drawn = new Map();         // what a part of the page shows, as text: unchanged parts are left alone

// ---- words ----

function count(value) { return value == null ? "–" : whole.format(value); }

function seconds(value) {
  if (value == null) return "–";
  if (value < 10) return value.toFixed(1) + " s";
  if (value < 120) return Math.round(value) + " s";
  const minutes = Math.floor(value / 60);
  if (minutes < 120) return minutes + " min " + Math.round(value % 60) + " s";
  return Math.floor(minutes / 60) + " h " + minutes % 60 + " min";
}

function bytes(value) {
  if (value == null) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < 4) { value /= 1024; at += 1; }
  return (at && value < 100 ? value.toFixed(1) : Math.round(value)) + " " + units[at];
}

function rate(value) {
  return value >= 100 ? count(Math.round(value)) : value.toFixed(value && value < 10 ? 1 : 0);
}

// ---- elements ----

function make(tag, name, ...inside) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  made.append(...inside.filter(one => one !== "" && one != null).map(one => one instanceof Node ? one : String(one)));
  return made;
}

function show(id, values, build) {
  const text = JSON.stringify(values);
  if (drawn.get(id) === text) return;
  drawn.set(id, text);
  by(id).replaceChildren(...[build(values)].flat());
}

function table(head, rows, numbers) {
  const line = (tag, cells) => make("tr", "", ...cells.map((cell, at) => make(tag, numbers.includes(at) ? "number" : "", cell)));
  const body = make("tbody", "", ...rows.map(cells => line("td", cells)));
  return make("div", "scroll", make("table", "", make("thead", "", line("th", head)), body));
}

function more(listed, all) { return listed < all ? [make("p", "soft", "and " + count(all - listed) + " more")] : []; }

// ---- what the service holds ----

function tile(name, value, extra, share) {
  const made = make("div", "tile", make("span", "name", name), make("span", "value", value));
  if (extra instanceof Node) made.append(extra);
  else if (extra) made.append(make("span", "more", extra));
  if (share != null) {
    const meter = make("div", share > 0.9 ? "meter full" : "meter", make("i"));
    meter.firstChild.style.width = Math.min(100, 100 * share) + "%";
    made.append(meter);
  }
  return made;
}

function curve(values, colour) {
  const canvas = make("canvas");
  canvas.setAttribute("aria-hidden", "true");
  requestAnimationFrame(() => {
    const scale = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
    if (!width) return;
    canvas.width = width * scale; canvas.height = height * scale;
    const pen = canvas.getContext("2d"), most = Math.max(1e-9, ...values);
    pen.scale(scale, scale);
    pen.strokeStyle = style(colour); pen.lineWidth = 1.5;
    pen.beginPath();
    values.forEach((value, at) => pen.lineTo(width * at / Math.max(40, values.length - 1), height - 2 - (height - 4) * value / most));
    pen.stroke();
  });
  return canvas;
}

function remember(shown) {
  if (!shown) return;
  if (history.partition !== shown.id) history = { written: [], used: [], partition: shown.id };
  const sum = list => list.reduce((all, one) => all + one.per_s, 0);
  history.written.push(sum(shown.fields)); history.used.push(sum(shown.tasks));
  for (const list of [history.written, history.used]) if (list.length > HISTORY) list.shift();
}

function tiles(look) {
  const server = look.server, leased = look.num_leases, last = list => list.length ? list[list.length - 1] : 0;
  const budget = server.arena_nbytes_budget, disk = server.spill_nbytes_budget;
  const made = [
    tile("Rows", count(server.rows), "in " + count(look.num_partitions) + (look.num_partitions === 1 ? " partition" : " partitions")),
    tile("Cells written per s", rate(last(history.written)), curve(history.written, "--written")),
    tile("Rows consumed per s", rate(last(history.used)), curve(history.used, "--consumed")),
    tile("Waiting requests", count(look.num_waits), rate(server.requests_per_s) + " requests per s"),
    tile("Leases", count(leased), server.dead_letters ? count(server.dead_letters) + " dead letters" : "no dead letters"),
    tile("Memory", bytes(server.arena_nbytes_used), "of " + bytes(budget), budget ? server.arena_nbytes_used / budget : null),
  ];
  if (disk || server.spill_nbytes_used) made.push(tile("Disk", bytes(server.spill_nbytes_used), "of " + bytes(disk), disk ? server.spill_nbytes_used / disk : null));
  const version = server.weight_version;
  made.push(tile("Weights", version == null ? "–" : "version " + version, version == null ? "none announced" : count(server.stale_rows) + " rows too old"));
  by("tiles").replaceChildren(...made);
}

function facts(look) {
  const server = look.server;
  const found = ["pid " + server.pid, count(server.clients) + (server.clients === 1 ? " client" : " clients")];
  if (server.run_id) found.unshift("run " + server.run_id);
  if (server.units) found.push(count(server.units) + " more hosts");
  if (server.engine) found.push(server.engine);
  if (server.takeovers) found.push(count(server.takeovers) + (server.takeovers === 1 ? " takeover" : " takeovers"));
  by("facts").textContent = found.join(" · ");
}

function partitions(look) {
  const select = by("partition");
  const known = look.partitions.map(one => [one.id, one.name, one.waits]);
  const text = JSON.stringify([known, chosen]);
  if (drawn.get("partition") !== text && document.activeElement !== select || !select.options.length) {
    drawn.set("partition", text);
    select.replaceChildren(...known.map(([id, name, waits]) => {
      const option = make("option", "", name + (waits ? " (" + waits + " waiting)" : ""));
      option.value = id;
      return option;
    }));
    select.value = chosen;
  }
  if (!look.shown && look.partitions.length && !look.partitions.some(one => one.id === chosen)) choose(look.partitions[0].id);
}

function about(shown) {
  if (!shown) return by("about").textContent = "There is no partition yet.";
  const parts = [count(shown.rows) + " rows" + (shown.declared == null ? "" : " of " + count(shown.declared) + " declared")];
  parts.push(count(shown.num_fields) + (shown.num_fields === 1 ? " field" : " fields"));
  if (shown.lost) parts.push(count(shown.lost) + " rows lost cells with their host");
  for (const [name, value] of shown.metadata.slice(0, 4)) parts.push(name + " " + value);
  by("about").textContent = parts.join(" · ");
}

function tasks(shown, waits) {
  const found = shown ? shown.tasks : [];
  const told = waits.filter(one => shown && one.partition === shown.id);
  show("tasks", [found, told, shown && shown.rows], () => found.length ? found.map(one => lane(one, shown, told)) : make("p", "soft", "No task has asked for rows of this partition."));
}

function lane(task, shown, told) {
  const stack = make("div", "stack"), size = Math.max(1, shown.rows);
  for (const [name, value] of [["consumed", task.consumed], ["leased", task.leased], ["ready", task.ready]]) {
    const part = make("i", name);
    part.style.width = 100 * value / size + "%";
    stack.append(part);
  }
  stack.setAttribute("role", "img");
  stack.setAttribute("aria-label", `${task.consumed} consumed, ${task.leased} leased, ${task.ready} ready of ${shown.rows}`);
  const key = (name, value) => make("span", "key " + name, count(value) + " " + name);
  const keys = [key("consumed", task.consumed), key("leased", task.leased), key("ready", task.ready)];
  if (task.oldest_s != null) keys.push("oldest ready " + seconds(task.oldest_s));
  if (task.kept) keys.push(count(task.kept) + " kept for ranks");
  if (task.returned) keys.push(count(task.returned) + " came back");
  if (task.max_age != null) keys.push("at most " + task.max_age + " versions old");
  const badges = [task.dead && count(task.dead) + " dead letters", task.stale && count(task.stale) + " too old"].filter(Boolean);
  const made = make("div", "task-lane",
    make("div", "head", make("h3", "", task.name, " ", ...badges.map(one => make("span", "badge", one))), make("span", "soft", rate(task.per_s) + " per s")),
    stack, make("div", "keys", ...keys.map(one => one instanceof Node ? one : make("span", "", one))));
  const waits = told.filter(one => one.task === task.id);
  if (waits.length) made.append(make("p", "wait", waits[0].short + " ", make("span", "for", "for " + seconds(waits[0].waited_s)), waits.length > 1 ? " and " + (waits.length - 1) + " more" : ""));
  return made;
}

function waiting(look) {
  const server = look.server, warnings = [];
  const share = server.arena_nbytes_budget ? server.arena_nbytes_used / server.arena_nbytes_budget : 0;
  if (share > 0.9) warnings.push("Memory is " + Math.round(100 * share) + " % full: puts wait until rows are cleared.");
  const rest = server.waiting_requests - look.num_waits;
  if (rest > 0) warnings.push(count(rest) + (rest === 1 ? " more request waits" : " more requests wait") + ": for a checkpoint that is loaded.");
  if (server.dead_letters) warnings.push(count(server.dead_letters) + " dead letters: tq dead-letters PARTITION TASK shows them.");
  const lost = look.partitions.filter(one => one.lost);
  if (lost.length) warnings.push("Rows of " + lost.slice(0, 3).map(one => one.name).join(", ") + " lost cells with their host.");
  show("waits", [look.waits, look.num_waits, warnings], () => {
    const items = look.waits.map(one => make("li", "",
      make("div", "wait", one.short, " ", make("span", "for", "for " + seconds(one.waited_s))),
      make("div", "soft", one.lacks), make("div", "soft", `${one.who}, ${seconds(one.left_s)} left`)));
    const warned = warnings.map(one => make("li", "", make("span", "badge", one)));
    return items.length + warned.length ? [make("ul", "list scroll", ...warned, ...items), ...more(look.waits.length, look.num_waits)] : [make("p", "soft", "Nobody waits.")];
  });
}

function leases(look) {
  show("leases", [look.leases, look.num_leases], () => look.leases.length ? [
    table(["Held by", "Task", "Rows", "Left"], look.leases.map(one => [one.holders.join(", ") || "nobody", one.task || one.num_groups + " groups of " + one.partition, count(one.rows), seconds(one.left_s)]), [2, 3]),
    ...more(look.leases.length, look.num_leases)] : [make("p", "soft", "No rows are lent.")]);
}

function sessions(look) {
  show("sessions", [look.sessions, look.num_sessions], () => [
    table(["Client", "Process", "Connections", "Holds"], look.sessions.map(one => [one.id, one.own ? "this page" : one.pid ? "pid " + one.pid : one.local ? "here" : one.host || "another host", count(one.connections), bytes(one.pinned)]), [2, 3]),
    ...more(look.sessions.length, look.num_sessions)]);
}

function replicas(look) {
  by("replicas-panel").hidden = !look.num_replicas;
  const late = one => one.said_s > 15 ? " (told " + seconds(one.said_s) + " ago)" : "";
  const state = one => one.ready ? make("span", "", "ready" + late(one)) : make("span", "badge", (one.reason || "not ready") + late(one));
  const version = one => one.version == null ? one.label || "–" : one.version + (one.label && one.label !== String(one.version) ? " (" + one.label + ")" : "");
  show("replicas", [look.replicas.map(one => [one.name, one.ready, one.reason, one.label, one.version, one.of, seconds(one.since_s), late(one)]), look.num_replicas], () => [
    table(["Replica", "Version", "State", "Since"], look.replicas.map(one => [one.name, version(one), state(one), seconds(one.since_s)]), [1, 3]),
    ...more(look.replicas.length, look.num_replicas)]);
}

function groups(look) {
  by("groups-panel").hidden = !look.groups.length;
  show("groups", look.groups, () => look.groups.flatMap(pool => {
    const words = [pool.open + " open", pool.running + " attempts under way", pool.sealed + " sealed", pool.lent + " lent", pool.eligible + " eligible", pool.waiting + " requests wait"];
    if (pool.oldest) words.push(pool.oldest);
    if (pool.ended) words.push("no more will be opened");
    const head = make("p", "", make("b", "", pool.partition), " ", make("span", "soft", words.join(" · ")));
    const rows = pool.sources.map(one => [one.name || "–", count(one.opened), count(one.sealed), count(one.consumed), seconds(one.starved_s)]);
    return rows.length ? [head, table(["Source", "Opened", "Sealed", "Consumed", "Since the last"], rows, [1, 2, 3, 4])] : [head];
  }));
}

function series(look) {
  by("series-panel").hidden = !look.series.length;
  show("series", look.series, () => make("ul", "list", ...look.series.map(one => make("li", "",
    make("b", "", one.name), " ",
    make("span", "soft", one.open.map(member => member.name + (member.left.length ? " (not yet done: " + member.left.join(", ") + ")" : "")).join(" · ")),
    one.waiting.length ? make("div", "wait", one.waiting.length + " wait to open: " + one.waiting.slice(0, 5).join(", ")) : ""))));
}

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
    cursor = Math.min(cursor, Math.max(0, found.runs - 1));
  }
  cellMap = found;
  paint();
}

function labels(shown) {
  show("lanes", shown && [shown.fields, shown.tasks, cellMap && cellMap.id === shown.id && [cellMap.fields, cellMap.tasks]], () => {
    if (!shown || !cellMap || cellMap.id !== shown.id) return [];
    const one = (kind, name, words) => {
      const made = make("div", "label " + kind, make("b", "", name), make("span", "", words));
      made.title = name;
      return made;
    };
    const field = (name, at) => { const of = shown.fields[at]; return one("field", name, of && of.name === name ? count(of.written) + (of.per_s ? " · " + rate(of.per_s) + "/s" : "") : ""); };
    const task = (name, at) => { const of = shown.tasks[at]; return one("task", name, of && of.name === name ? count(of.consumed) + " consumed" : ""); };
    return [...cellMap.fields.map(field), ...cellMap.tasks.map(task)];
  });
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
  const text = (cellMap.each > 1 ? count(cellMap.each) + " rows from #" : "row #") + first + ": " + (words.join(", ") || "nothing yet");
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

// ---- one row ----

async function openRow(query, title) {
  const asked = opened = { query };
  by("row-title").textContent = title;
  by("row-body").replaceChildren(make("p", "soft", "…"));
  if (!by("row").open) by("row").showModal();
  let found;
  try {
    const answer = await fetch("row?" + new URLSearchParams({ partition: chosen, ...query }));
    found = await answer.json();
  } catch { found = { error: "The page's own process does not answer." }; }
  if (opened !== asked) return;
  opened.row = found.error ? Number(query.row) : found.row;
  for (const id of ["row-before", "row-after"]) by(id).disabled = !(opened.row >= 0);
  by("row-body").replaceChildren(...(found.error ? [make("p", "trouble", found.error)] : journey(found)));
  if (!found.error) by("row-title").textContent = "Row #" + found.row + (found.key == null ? "" : " · " + found.key);
}

function journey(found) {
  const words = [found.partition];
  if (found.group != null) words.push("group " + found.group);
  if (found.age != null) words.push(found.age === 0 ? "made with the newest weights" : found.age + " versions of the weights old");
  const made = [make("p", "soft", words.join(" · "))];
  const section = (title, part) => made.push(make("h3", "", title), part);
  section("What happened", found.events.length ? make("ol", "timeline", ...found.events.map(event)) : make("p", "soft", "The service remembers nothing of this row."));
  if (found.tasks.length) section("To each task", table(["Task", "State", "Attempts", "Used by"], found.tasks.map(one => [
    one.name, one.state + (one.lease ? ", lease " + one.lease : ""), one.attempts + (one.reason ? ": " + one.reason : ""),
    one.steps.map(([step, batch]) => (step < 0 ? "no step yet" : "step " + step) + ", batch " + batch).join("; ") || "–"]), []));
  if (found.tags.length) section("Tags", table(["Tag", "Value"], found.tags, []));
  section("Values", make("div", "", ...found.fields.map(one => value(found, one))));
  if (found.missing.length) made.push(make("p", "soft", "Not written: " + found.missing.join(", ")));
  return made;
}

function event(one) {
  const whose = one.task ? "it for " + one.task : one.detail;
  const text = { written: "wrote " + one.detail, finished: "made it: " + one.detail, taken: "took it for " + one.task, selected: "took " + one.detail, withheld: "took " + one.detail + " without it", acknowledged: "acknowledged " + whose, returned: "gave back " + whose + (one.task && one.detail ? ": " + one.detail : "") }[one.what] || one.what + " " + one.task + " " + one.detail;
  return make("li", one.what, one.who + " " + text, " ", make("span", "soft", seconds(one.ago_s) + " ago"));
}

function value(found, one) {
  const made = make("div", "field-value", make("div", "head", make("b", "", one.name), make("span", "soft", one.type || one.schema)));
  if (one.kind === "image") {
    const image = make("img");
    image.alt = "picture of " + one.name;
    image.src = "image?" + new URLSearchParams({ partition: chosen, row: found.row, field: one.id });
    image.onerror = () => image.replaceWith(make("p", "soft", "no picture can be made of it"));
    made.append(image);
  } else if (one.text) made.append(make("pre", "", one.text));
  if (one.about) made.append(make("p", "soft", one.about));
  return made;
}

function stepRow(by) { if (opened && opened.row + by >= 0) openRow({ row: opened.row + by }, "Row #" + (opened.row + by)); }

// ---- events ----

function status(kind, word, text) {
  by("status").className = "status " + kind;
  if (by("status").textContent !== word) by("status").textContent = word;
  by("trouble").hidden = !text;
  if (by("trouble").textContent !== text) by("trouble").textContent = text;
}

function look(found) {
  if (found.trouble) return status("bad", "no service", "The service is not there: " + found.trouble);
  status("live", "live", "");
  remember(found.shown);
  facts(found); tiles(found); partitions(found); about(found.shown); waiting(found); leases(found); replicas(found); sessions(found);
  groups(found); series(found); tasks(found.shown, found.waits);
  if (!found.shown) newMap(null);
  labels(found.shown);
}

function listen() {
  if (stream) stream.close();
  heardAt = Date.now();
  stream = new EventSource("events?partition=" + encodeURIComponent(chosen));
  const heard = done => event => { heardAt = Date.now(); done(JSON.parse(event.data)); };
  stream.addEventListener("look", heard(look));
  stream.addEventListener("map", heard(newMap));
  stream.addEventListener("silent", heard(value => status("bad", "no answer", "The service has not answered for " + seconds(value) + ". What is shown is from before.")));
}

async function watch() {
  if (document.hidden || Date.now() - heardAt < SILENT_MS) return;
  status("bad", "no page", "The page's own process does not answer. Is it still running?");
  listen();  // a stream that was refused does not try again by itself
  const answer = await fetch("static/page.js", { method: "HEAD", signal: AbortSignal.timeout(SILENT_MS) }).catch(() => null);
  if (answer && answer.status === 401) location.reload();  // it was started anew, and wants its token
}

function choose(id) {
  chosen = id;
  globalThis.history.replaceState(null, "", "#" + id);
  cursor = 0;
  newMap(null);
  listen();
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
  by("partition").onchange = event => choose(event.target.value);
  by("find").onsubmit = event => {
    event.preventDefault();
    const wanted = by("wanted").value;
    if (/^#\d+$/.test(wanted)) openRow({ row: wanted.slice(1) }, "Row " + wanted);
    else if (wanted) openRow({ key: wanted }, "Row");
  };
  const canvas = by("cells");
  canvas.onpointermove = event => { if (cellMap) move(runAt(event)); };
  canvas.onpointerleave = canvas.onblur = canvas.onfocus = () => paint();
  const openHere = () => { if (cellMap && cellMap.runs) openRow({ row: cellMap.first_rows[cursor] }, "Row #" + cellMap.first_rows[cursor]); };
  canvas.onclick = event => { if (cellMap) { move(runAt(event)); openHere(); } };
  canvas.onkeydown = event => {
    const page = cellMap ? Math.max(1, Math.round(cellMap.runs / 10)) : 1;
    const to = { ArrowLeft: cursor - 1, ArrowDown: cursor - 1, ArrowRight: cursor + 1, ArrowUp: cursor + 1, PageDown: cursor - page, PageUp: cursor + page, Home: 0, End: Infinity }[event.key];
    if (to !== undefined) { event.preventDefault(); move(to); }
    else if (event.key === "Enter" || event.key === " ") { event.preventDefault(); openHere(); }
  };
  by("row-close").onclick = () => by("row").close();
  by("row").onclose = () => { opened = null; };
  by("row-before").onclick = () => stepRow(-1);
  by("row-after").onclick = () => stepRow(1);
  by("row").onclick = event => { if (event.target === by("row")) by("row").close(); };
  addEventListener("resize", () => paint());
  addEventListener("hashchange", () => choose(location.hash.slice(1)));
  document.addEventListener("visibilitychange", () => { if (document.hidden) { if (stream) stream.close(); } else listen(); });
  setInterval(watch, 1000);
  if (!document.hidden) listen();
}

begin();
