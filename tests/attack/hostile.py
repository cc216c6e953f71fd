"""Hostile files, made from good ones: every format, every field."""

import copy
import csv
import gzip
import io
import json
import os
import random

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

MARKUP = "[/]\x1b[2J[bold]=1+1"
VALUES = [
    None, True, -1, 0, 10**7, 10**35, 1e308, float("nan"), float("inf"), "", "x",
    "../../etc/passwd", "/\0.csv", MARKUP, "\ud800", [], {}, [[]], {"a": {"b": []}},
    [1, "x"],
]  # fmt: skip
WHOLE = {
    "deep": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "digits": b"1" * 10_000,
    "power": b'{"step": 1' + b"0" * 400 + b"}",
    "empty": b"",
    "zeros": b"\0" * 4096,
    "text": b"what",
    "number": b"5",
    "list": b"[]",
    "object": b"{}",
    "bytes": bytes(range(256)) * 8,
}
SPECIAL = ("pipe", "endless", "folder", "sparse", "dangling")


def fields_of(value, path=()):
    """Every place inside plain data, the first two of a list."""
    yield path
    if isinstance(value, dict):
        parts = list(value.items())
    else:
        parts = list(enumerate(value))[:2] if isinstance(value, list) else []
    for name, part in parts:
        yield from fields_of(part, (*path, name))


def changed(value, path, new):
    if not path:
        return new
    value = copy.deepcopy(value)
    inside = value
    for name in path[:-1]:
        inside = inside[name]
    if new is KeyError:
        del inside[path[-1]]
    else:
        inside[path[-1]] = new
    return value


def json_mutants(text):
    value = json.loads(text)
    for path in fields_of(value):
        if path:
            yield f"no {path}", json.dumps(changed(value, path, KeyError)).encode()
        for new in VALUES:
            name = f"{path} = {new!r:.20}"
            yield name, json.dumps(changed(value, path, new)).encode()


def lines_mutants(text):
    """One line of JSON lines is changed, the first, a middle or the last."""
    lines = text.splitlines()
    for number in sorted({0, len(lines) // 2, len(lines) - 1}):
        mutants = [*json_mutants(lines[number]), *WHOLE.items()]
        for name, data in mutants:
            parts = [line.encode() for line in lines]
            parts[number] = data
            yield f"line {number}: {name}", b"\n".join(parts) + b"\n"


def archive_mutants(path):
    with safe_open(path, framework="np") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        about = (file.metadata() or {}).get("coulomb")
    metadata = None if about is None else {"coulomb": about}

    def made(name, array):
        parts = {k: v for k, v in tensors.items() if k != name}
        if array is not None:
            parts[name] = np.ascontiguousarray(array)
        return save(parts, metadata=metadata)

    for name, array in tensors.items():
        bad = array.astype(np.float64)
        bad.reshape(-1)[:1] = np.nan
        with np.errstate(invalid="ignore"):
            yield f"{name} NaN", made(name, bad.astype(array.dtype))
        bad.reshape(-1)[:1] = -np.inf
        yield f"{name} inf", made(name, bad)
        yield f"{name} negative", made(name, -np.abs(array.astype(np.float64)) - 1)
        for kind in (np.int64, np.float16, np.float64, np.uint8, np.bool_):
            if array.dtype != kind:
                yield f"{name} {kind.__name__}", made(name, np.zeros(array.shape, kind))
        yield f"{name} flat", made(name, array.reshape(-1)[:-1])
        yield f"{name} missing", made(name, None)
        yield f"{name} empty", made(name, np.zeros((0,), array.dtype))
    yield "extra", made("extra_", np.zeros(3))
    if about is not None:
        for name, text in json_mutants(about):
            facts = {"coulomb": text.decode()}
            yield f"facts {name}", save(tensors, metadata=facts)
        for name, text in WHOLE.items():
            if name not in ("zeros", "bytes"):
                facts = {"coulomb": text.decode()}
                yield f"facts {name}", save(tensors, metadata=facts)


def table_mutants(text):
    """One cell of the first or the last row, or the name of a column, is changed."""
    rows = list(csv.reader(io.StringIO(text)))
    for line in (0, 1, len(rows) - 1):
        for place in range(len(rows[0])):
            for new in VALUES:
                cell = new if isinstance(new, str) else json.dumps(new)
                changed_row = [*rows[line][:place], cell, *rows[line][place + 1 :]]
                yield f"line {line}, {place} = {new!r:.20}", rows, line, changed_row
        yield f"line {line} long", rows, line, [*rows[line], "x"]
        yield f"line {line} short", rows, line, rows[line][:-1]


def packed_mutants(data, draw):
    """What is inside of a compressed table is changed."""
    text = gzip.decompress(data).decode()
    for name, rows, line, row in table_mutants(text):
        file = io.StringIO()
        csv.writer(file).writerows([*rows[:line], row, *rows[line + 1 :]])
        yield name, gzip.compress(file.getvalue().encode("utf-8", "surrogatepass"))
    for name, inside in (*WHOLE.items(), *cut_and_flipped(text.encode(), draw)):
        yield f"inside {name}", gzip.compress(inside)


def cut_and_flipped(data, draw):
    for share in (0.1, 0.5, 0.99):
        yield f"cut {share}", data[: int(share * len(data))]
    for _ in range(12):
        bad = bytearray(data)
        for _ in range(draw.randint(1, 8)):
            bad[draw.randrange(len(bad))] = draw.randrange(256)
        yield "flipped", bytes(bad)


def mutants(path, seed=0):
    """Names and bytes of files like `path` that are wrong somewhere."""
    draw = random.Random(seed)
    data = path.read_bytes()
    if path.suffix == ".safetensors":
        yield from archive_mutants(path)
    elif path.suffix == ".jsonl":
        yield from lines_mutants(data.decode())
    elif path.suffix == ".json":
        yield from json_mutants(data.decode())
    elif path.suffix == ".gz":
        yield from packed_mutants(data, draw)
    yield from WHOLE.items()
    yield from cut_and_flipped(data, draw)
    for kind in SPECIAL:
        yield kind, None


def put(path, name, data):
    """Put a mutant in the place of a good file."""
    path.unlink(missing_ok=True)
    if data is not None:
        path.write_bytes(data)
    elif name == "pipe":
        os.mkfifo(path)
    elif name == "endless":
        path.symlink_to("/dev/zero")
    elif name == "folder":
        path.mkdir()
    elif name == "sparse":
        with path.open("wb") as file:
            file.truncate(2**40)
    else:
        path.symlink_to("/nowhere/at/all")
