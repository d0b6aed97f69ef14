"""Configs of OmegaConf as plain data: what they hold, with their interpolations, and the flags of the whole.

An interpolation that names another part of its config stays one. One that calls a resolver (`${eval:...}`) does not
travel: whoever reads the config would run what the message says. The writer's result goes in its place, and a text of a
message that would be such a call is a text.
"""

from __future__ import annotations

import dataclasses
import enum
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from transfer_queue.codec.exact import listed, of_type
from transfer_queue.errors import UnsupportedValue

# An interpolation that looks up a variable of the environment, and does nothing else, stays one: what it is for the
# writer may be a secret.
_VARIABLE = re.compile(r"\$\{oc\.env:\w+(?:,[\w./ -]*)?\}")
_INTERPOLATION = re.compile(r"(\\*)\$\{")


def is_config(omegaconf: Any, value: Any) -> bool:
    """Whether it is a config, and none of a user's own class."""
    return type(value) in (omegaconf.DictConfig, omegaconf.ListConfig)


def taken_apart(omegaconf: Any, config: Any) -> list[Any]:
    """[whether it is a list, its content, its flags]. Interpolations stay, but for calls, and for those of a part: what
    they name may lie outside of it. Raises `UnsupportedValue` for what a config made of these would not have."""
    _check(omegaconf, config)
    part = config._get_parent() is not None
    try:
        plain = omegaconf.OmegaConf.to_container(config, resolve=part)
        plain = _escaped(plain) if part else _resolved(omegaconf, plain, config)
    except omegaconf.errors.OmegaConfBaseException as error:
        raise UnsupportedValue(f"a config cannot be stored: {error}") from None
    return [isinstance(config, omegaconf.ListConfig), plain, dict(config._metadata.flags or {})]


def _is_call(text: str) -> bool:
    """Whether a text may call a resolver: a colon within an interpolation (OmegaConf's grammar)."""
    if "${" not in text or ":" not in text:
        return False
    text, depth, slashes = _VARIABLE.sub("", text), 0, 0
    for at, letter in enumerate(text):
        if letter == "$" and text[at + 1 : at + 2] == "{" and slashes % 2 == 0:
            depth += 1
        elif letter == "}":
            depth = max(0, depth - 1)
        elif letter == ":" and depth:
            return True
        slashes = slashes + 1 if letter == "\\" else 0
    return False


def _calls(plain: Any) -> bool:
    if type(plain) is dict:
        return any(map(_calls, plain.values()))
    return any(map(_calls, plain)) if type(plain) is list else type(plain) is str and _is_call(plain)


def _resolved(omegaconf: Any, plain: Any, config: Any) -> Any:
    """The content of `config` with what its calls give, and its other interpolations."""
    if not _calls(plain):
        return plain
    if type(plain) is dict:
        return {key: _of_item(omegaconf, item, config, key) for key, item in plain.items()}
    return [_of_item(omegaconf, item, config, place) for place, item in enumerate(plain)]


def _of_item(omegaconf: Any, item: Any, config: Any, key: Any) -> Any:
    if not _calls(item):
        return item
    value = config[key]  # only of what calls: another interpolation may lead nowhere yet
    if type(item) is not str:
        return _resolved(omegaconf, item, value)
    is_config = omegaconf.OmegaConf.is_config(value)
    return _escaped(omegaconf.OmegaConf.to_container(value, resolve=True) if is_config else value)


def _check(omegaconf: Any, config: Any) -> None:
    for node in _nodes(config):
        about = node._metadata
        kinds = {about.object_type, getattr(about, "element_type", Any), getattr(about, "key_type", Any)}
        if isinstance(node, omegaconf.ValueNode):
            kinds = {Any} if type(node) is omegaconf.AnyNode else {type(node)}
        typed = kinds - {Any, None, dict, list} - ({int} if isinstance(node, omegaconf.ListConfig) else set())
        if typed:
            name = getattr(next(iter(typed)), "__name__", "")
            raise UnsupportedValue(
                f"a config of types ({name}) would come back without them: put OmegaConf.create("
                f"OmegaConf.to_container(config)), and merge it into the types where it is read"
            )
        if node is not config and about.flags:
            raise UnsupportedValue(
                f"a config with flags {dict(about.flags)} of its part {node._get_full_key(None)!r} would lose them: "
                f"set flags on the whole config"
            )


def _nodes(node: Any) -> Iterator[Any]:
    """It and all that it holds."""
    yield node
    content = getattr(node, "_content", None)
    for child in content.values() if type(content) is dict else content if type(content) is list else ():
        yield from _nodes(child)


def _with_texts(plain: Any, change: Callable[[str], str]) -> Any:
    """A content with its texts changed."""
    if type(plain) is dict:
        return {key: _with_texts(item, change) for key, item in plain.items()}
    if type(plain) is list:
        return [_with_texts(item, change) for item in plain]
    return change(plain) if type(plain) is str else plain


def _as_text(text: str) -> str:
    return _INTERPOLATION.sub(r"\1\1\\${", text)


def _escaped(plain: Any) -> Any:
    """A content that was resolved, so that its texts are not resolved once more."""
    return _with_texts(plain, _as_text)


def _called_off(plain: Any) -> Any:
    """A content of a message, in which nothing is a call."""
    return _with_texts(plain, lambda text: _as_text(text) if _is_call(text) else text)


def put_together(content: Any) -> Any:
    """The config. Raises ValueError and TypeError for what is none."""
    import omegaconf

    is_list, plain, flags = listed(content, 3)
    kind = omegaconf.ListConfig if of_type(is_list, bool) else omegaconf.DictConfig
    if flags is not None and set(map(type, of_type(flags, dict).values())) - {bool, type(None)}:
        raise TypeError("a flag of a config is true or false")
    _check_config(plain, flags is not None and flags.get("allow_objects") is True)
    try:
        return kind(_called_off(plain), flags=flags or None)
    except omegaconf.errors.OmegaConfBaseException as error:
        raise ValueError(str(error)) from None


def _check_config(plain: Any, objects: bool) -> None:
    """What a config is made of: OmegaConf would look into a dataclass, of which it has none."""
    if type(plain) is list:
        for item in plain:
            _check_config(item, objects)
    elif type(plain) is dict:
        for item in (*plain, *plain.values()):
            _check_config(item, objects)
    elif not isinstance(type(plain), enum.EnumMeta) and (not objects or dataclasses.is_dataclass(type(plain))):
        of_type(plain, str, int, float, bool, bytes, type(None), type(pathlib.Path()))
