"""Changes of files, from single bits to whole structures, all decided by a random number generator."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

NUMBERS = (0, -1, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**9, 10**30)
NUMBERS += (10**400, 0.5, -0.0, 1e-320, 1e308, 1e400, -1e400, float("nan"))
TEXTS = (
    "",
    "x",
    "..",
    "../../x",
    "/etc/passwd",
    "\0",
    "[/]",
    "[bold]x",
    "<script>",
    "%s%n",
    "\ud800",
    "\u202e",
    "💥",
    "a" * 5000,
)
TEXTS += (
    "nan",
    "inf",
    "None",
    "true",
    "auto",
    "cuda",
    "residual",
    "mhc",
    "temper-cp",
    "*",
    "a b",
    "a\nb",
    "-1",
    "--",
    "=",
)
WORDS = (
    "1e9",
    "-1",
    "0",
    "1",
    "3",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "2147483648",
    "9223372036854775808",
    "9" * 400,
    "0x10",
    "1_000",
)
WORDS += (
    "",
    " ",
    "x",
    "..",
    "/",
    "/dev/null",
    "/etc/passwd",
    "~",
    "{}",
    "[]",
    '{"rank": 0}',
    '{"rank": 1e400}',
    "[" * 5000,
)
WORDS += (
    "true",
    "None",
    "auto",
    "cuda",
    "cuda:7",
    "meta",
    "\x00x",
    "\udcff",
    "💥",
    "a" * 3000,
    "2x2",
    "0x0",
    "8x8x8x8",
    "mhc",
    "temper-cp",
)
WORDS += (
    "residual,mhc",
    "temper-cp:rank=0",
    "mhc:method=newton:x=1",
    "1e-320",
    "0.5",
    "fsdp",
    "hf",
    "nanochat",
    "--",
    "-h x",
    "*",
)


def strange_value(rng: random.Random) -> str:
    """A value for an option."""
    word = rng.choice(WORDS)
    # What cannot be given to a program at all is no case.
    return word.replace("\x00", "")


def mutated(content: bytes, suffix: str, rng: random.Random) -> bytes:
    """The content of a file with something wrong in it."""
    if suffix in (".json", ".jsonl") and rng.random() < 0.75:
        return _json(content, suffix, rng)
    if suffix == ".safetensors" and rng.random() < 0.6:
        return _safetensors(content, rng)
    if suffix in (".toml", ".yaml", ".csv", ".txt") and rng.random() < 0.7:
        return _text(content, rng)
    return _bytes(content, rng)


def _bytes(content: bytes, rng: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((1, 4, 64, 1024)))
        match rng.randrange(8):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1:
                del data[at:end]
            case 2:
                data[at:at] = rng.randbytes(rng.choice((1, 4, 300)))
            case 3:
                del data[at:]
            case 4:
                data[at:at] = data[at:end]
            case 5:
                data[at:end] = bytes(end - at)
            case 6:
                data[at:end] = b"\xff" * (end - at)
            case _:
                data[at:at] = rng.choice((b"\0", b"\n", b"\r", b"\xef\xbb\xbf", b"\xff\xfe", b"[" * 3000, b"{" * 3000))
    return rng.choice((bytes(data), bytes(data), bytes(data), b"", b"\0" * 100)) if rng.random() < 0.1 else bytes(data)


def _text(content: bytes, rng: random.Random) -> bytes:
    """A value, a line or a word of a text replaced."""
    lines = content.decode("utf-8", "replace").split("\n")
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(lines))
        value = _spelled(strange(rng), rng)
        mark = next((sign for sign in ("=", ":", ",") if sign in lines[at]), None)
        match rng.randrange(6):
            case 0 | 1 if mark:
                lines[at] = f"{lines[at].split(mark)[0]}{mark} {value}"
            case 2:
                del lines[at]
                lines = lines or [""]
            case 3:
                lines.insert(at, lines[rng.randrange(len(lines))])
            case 4:
                lines[at] = value
            case _:
                lines.insert(at, f"{rng.choice(TEXTS)} {mark or '='} {value}")
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _spelled(value: Any, rng: random.Random) -> str:
    text = _dumps(value)
    return rng.choice((text, text, str(value), "&a [*a, *a]", "!!python/object/apply:os.system ['id']", "[" * 2000))[
        :200_000
    ]


def strange(rng: random.Random) -> Any:
    """A value that is rarely expected."""
    match rng.randrange(9):
        case 0 | 1:
            return rng.choice(NUMBERS)
        case 2 | 3:
            return rng.choice(TEXTS)
        case 4:
            return rng.choice((None, True, False))
        case 5:
            return rng.choice(([], {}, [[]], [None], {"": None}, {"a": {"b": [1]}}))
        case 6:
            return [strange(rng) for _ in range(rng.randrange(4))]
        case 7:
            return {rng.choice(TEXTS): strange(rng) for _ in range(rng.randrange(4))}
        case _:
            return _Deep(rng.choice((40, 500, 100_000)))


class _Deep:
    """So many lists in each other, which only text can hold."""

    def __init__(self, depth: int) -> None:
        self.depth = depth


def _json(content: bytes, suffix: str, rng: random.Random) -> bytes:
    if suffix == ".jsonl":
        lines = content.split(b"\n")
        at = rng.randrange(len(lines))
        lines[at] = _json(lines[at] or b"{}", ".json", rng)
        return b"\n".join(lines)
    try:
        value = json.loads(content)
    except ValueError:
        return _bytes(content, rng)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        value = _changed(value, rng)
    return _dumps(value).encode("utf-8", "surrogatepass")


def _changed(value: Any, rng: random.Random) -> Any:
    """The value with one part of it changed: on the way down, every container is as likely as its parts."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.12:
        return strange(rng)
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key = rng.choice(keys)
    match rng.randrange(10):
        case 0:
            del value[key]
        case 1 if isinstance(value, dict):
            value[rng.choice((*TEXTS, str(key) + "x"))] = value[key]
        case 1:
            value += value[:50]
        case 2 if isinstance(value, dict):
            value[key] = value[rng.choice(keys)]
        case _:
            value[key] = _changed(value[key], rng)
    return value


def _dumps(value: Any) -> str:
    """JSON, of numbers that are too long for it as well."""
    if isinstance(value, _Deep):
        return "[" * value.depth + "]" * value.depth
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(str(key))}:{_dumps(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_dumps, value)) + "]"
    return json.dumps(value)


def _safetensors(content: bytes, rng: random.Random) -> bytes:
    """A header that lies."""
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    name = rng.choice([name for name in header if name != "__metadata__"])
    match rng.randrange(8):
        case 0:
            header[name]["dtype"] = rng.choice(("I32", "BOOL", "F8_E4M3", "F64", "I64", "x", 3, "BF16", "F16"))
        case 1:
            header[name]["shape"] = rng.choice(
                ([0], [], [2**31, 2**31], [-1], [1, 1, 1], ["x"], None, header[name]["shape"] + [1])
            )
        case 2:
            header[name]["data_offsets"] = rng.choice(([0, 0], [0, 2**62], [8, 4], [-1, 4], "x", [0]))
        case 3:
            del header[name]
        case 4:
            header["x" + name] = header[name]
        case 5:
            header["__metadata__"] = rng.choice(
                ({"shared": '{"a": "b"}'}, {"shared": "[" * 5000}, {"shared": "[1]"}, {"x": 1}, 3)
            )
        case 6:
            values = bytearray(data)
            at = 4 * rng.randrange(len(values) // 4)
            values[at : at + 4] = struct.pack("<f", rng.choice((float("nan"), float("inf"), 3e38, -3e38, 1e-45)))
            data = bytes(values)
        case _:
            text = json.dumps(_changed(header, rng), default=lambda deep: None).encode()
            return struct.pack("<Q", rng.choice((len(text), len(text), len(text) + 1, 2**63, 0))) + text + data
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data
