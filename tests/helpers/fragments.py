"""HTML as tests read it: what a person would see in the element of an id."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from typing import NamedTuple

VOID = frozenset({"img", "input", "link", "meta", "br"})


class Element:
    def __init__(self, tag: str, attributes: dict[str, str]) -> None:
        self.tag = tag
        self.attributes = attributes
        self.children: list[Element | str] = []

    @property
    def text(self) -> str:
        """All of it, with single spaces."""
        return " ".join(self._raw().split())

    def _raw(self) -> str:
        return "".join(one if isinstance(one, str) else one._raw() for one in self.children)

    def all(self) -> Iterator[Element]:
        """It, and every element in it."""
        yield self
        for one in self.children:
            if isinstance(one, Element):
                yield from one.all()

    def of_tag(self, *tags: str) -> list[Element]:
        return [one for one in self.all() if one.tag in tags]

    def of_class(self, name: str) -> list[Element]:
        return [one for one in self.all() if name in one.attributes.get("class", "").split()]

    def of_id(self, name: str) -> Element:
        """Raises `KeyError` where there is none."""
        return {one.attributes["id"]: one for one in self.all() if "id" in one.attributes}[name]

    def __getitem__(self, name: str) -> str:
        """The text of the element of that id. Raises `KeyError` where there is none."""
        return self.of_id(name).text

    def rows(self, name: str) -> list[list[str]]:
        """The cells of the tables in the element of that id."""
        lines = [row.of_tag("td") for row in self.of_id(name).of_tag("tr")]
        return [[cell.text for cell in line] for line in lines if line]


class Value(NamedTuple):
    """A value of a row, as it is shown."""

    kind: str
    type: str
    text: str
    about: str
    address: str


def values(row: Element) -> dict[str, Value]:
    """The values of a row, by field."""
    return {one.of_tag("b")[0].text: _value(one) for one in row.of_class("field-value")}


def _value(one: Element) -> Value:
    said, kind = one.of_class("soft"), "text"
    for text in one.of_tag("pre"):
        return Value(text.attributes["class"], said[0].text, text.text, said[-1].text if said[1:] else "", "")
    for image in one.of_tag("img"):
        return Value("image", said[0].text, "", "", image.attributes["src"])
    return Value(kind, said[0].text, "", "", "")


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = Element("", {})
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        made = Element(tag, {name: text or "" for name, text in attrs})
        self._open[-1].children.append(made)
        if tag not in VOID:
            self._open.append(made)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop().tag == tag, f"</{tag}> ends another element"

    def handle_data(self, data: str) -> None:
        self._open[-1].children.append(data)


def parsed(html: str) -> Element:
    """An element around all that is in `html`, in which every element is ended."""
    parser = _Parser()
    parser.feed(html)
    parser.close()
    assert parser._open == [parser.root], f"<{parser._open[-1].tag}> is not ended"
    return parser.root
