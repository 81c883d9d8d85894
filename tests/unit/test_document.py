"""Strict reading: the lines of keys, the limits, and what TOML and YAML would let through."""

import tomllib
from pathlib import Path

import pytest

from tests.work import counted_calls
from whale.errors import InputFileError, UsageError
from whale.ir.document import Format, parse_document, read_document
from whale.ir.json_text import format_json

TOML = """\
# a comment, with ] and "
title = "a # b"          # trailing
[a.b]
"quoted key" = 'x = [1]'
c = [ 1,                 # inside
      {d = 2, e.f = "]"},
]
text = \"\"\"
[not.a.table]
x = "\\\"\"\"
\"\"\"
raw = '''[no]
'''
when = 1979-05-27 07:32:00
[[rows]]
n = 1
[rows.inner]
deep = true
[[rows]]
n = 2
[[rows.parts]]
p = -1.5e3
"""


def error_of(text: str, format: Format) -> InputFileError:
    with pytest.raises(InputFileError) as refusal:
        parse_document(text, format, source="file")
    return refusal.value


def test_every_key_of_a_toml_file_has_its_line() -> None:
    document = parse_document(TOML, "toml")
    assert document.value == tomllib.loads(TOML)
    assert {".".join(map(str, path)): line for path, line in document.lines.items()} == {
        "title": 2,
        "a.b": 3,
        "a.b.quoted key": 4,
        "a.b.c": 5,
        "a.b.c.0": 5,
        "a.b.c.1": 6,
        "a.b.c.1.d": 6,
        "a.b.c.1.e": 6,
        "a.b.c.1.e.f": 6,
        "a.b.text": 8,
        "a.b.raw": 12,
        "a.b.when": 14,
        "rows": 15,
        "rows.0": 15,
        "rows.0.n": 16,
        "rows.0.inner": 17,
        "rows.0.inner.deep": 18,
        "rows.1": 19,
        "rows.1.n": 20,
        "rows.1.parts": 21,
        "rows.1.parts.0": 21,
        "rows.1.parts.0.p": 22,
    }


def test_windows_line_ends_change_nothing() -> None:
    assert parse_document(TOML.replace("\n", "\r\n"), "toml").lines == parse_document(TOML, "toml").lines


def test_every_key_of_a_yaml_file_has_its_line() -> None:
    document = parse_document("a:\n  b: 1\n  c:\n    - x\n    - {d: 2,\n       e: 3}\n", "yaml")
    assert document.value == {"a": {"b": 1, "c": ["x", {"d": 2, "e": 3}]}}
    assert [document.line_of(path) for path in [("a",), ("a", "b"), ("a", "c", 1), ("a", "c", 1, "e")]] == [1, 2, 5, 6]


def test_something_missing_is_placed_at_what_is_around_it() -> None:
    document = parse_document(TOML, "toml", source="x.toml")
    assert str(document.error("is missing", ("rows", 1, "q"))) == "x.toml:19: is missing"
    assert str(document.error("is missing", ("q",))) == "x.toml: is missing"


def test_scalars_are_those_of_yaml_1_2() -> None:
    text = "[yes, no, on, off, true, False, 012, 0o14, 0xC, 1:30, 1_000, 2001-01-01, ~, '1', 1.5, 1e3, .5, <<]"
    assert parse_document(f"a: {text}", "yaml").value["a"] == [
        *("yes", "no", "on", "off", True, False, 12, 12, 12, "1:30", "1_000", "2001-01-01"),
        *(None, "1", 1.5, 1000.0, 0.5, "<<"),
    ]


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a = 1\na = 2\n", 2, "Cannot overwrite"),
        ("a = 1\nb = {c = 1, c = 2}\n", 2, "Duplicate"),
        ("a = 1\nb = nan\n", 2, "not a finite"),
        ("a = [1,\n -inf]\n", 2, "not a finite"),
        ("a = 1\nb = 1e999\n", 2, "not a finite"),
        ("a = 1\n[b\n", 2, "expected"),
        ("a = 1 2\n", 1, "not valid TOML"),
        ("a = \n", 1, "expected a value"),
        ('a = "x\n', 1, "expected a value"),
        ("= 1\n", 1, "expected a key"),
        ("a = 1\nb = " + "[" * 40 + "]" * 40, 2, "32 levels"),
        (".".join("a" * 40) + " = 1", 1, "32 levels"),
        ("[" + ".".join("a" * 40) + "]", 1, "32 levels"),
        ("a = " + "9" * 5000, None, "not valid TOML"),
        ("a = [" + "1," * 60_000 + "]", 1, "50000 values"),
        ("a = 1\x00", 1, "not valid TOML"),
    ],
)
def test_a_bad_toml_file_is_refused_with_its_line(text: str, line: int | None, message: str) -> None:
    error = error_of(text, "toml")
    assert message in str(error)
    assert error.line == line


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "given twice"),
        ("a: 1\n'a': 3\n", 2, "given twice"),
        ("a: 1\nb: .nan\n", 2, "not a finite"),
        ("b: -.INF\n", 1, "not a finite"),
        ("b: 1e999\n", 1, "not a finite"),
        ("a: &x [1]\nb: *x\n", 2, "alias"),
        ("a: !!python/object/apply:os.system [ls]\n", 1, "tag"),
        ("a: !!binary aGk=\n", 1, "tag"),
        ("1: a\n", 1, "key must be a string"),
        ("[a]: b\n", 1, "key must be a string"),
        ("true: b\n", 1, "key must be a string"),
        ("- a\n", 1, "table"),
        ("just text\n", 1, "table"),
        ("a: 1\n---\nb: 2\n", 2, "more than one"),
        ("a: [1\nb: 2\n", 2, "not valid YAML"),
        ("a: " + "[" * 40, 1, "32 levels"),
        ("a: [" + "1," * 60_000 + "]", 1, "50000 values"),
        ("a: " + "9" * 5000, 1, "100 digits"),
        ("a: \x00", None, "not valid YAML"),
    ],
)
def test_a_bad_yaml_file_is_refused_with_its_line(text: str, line: int | None, message: str) -> None:
    error = error_of(text, "yaml")
    assert message in str(error)
    if line is not None:
        assert error.line == line


def test_an_alias_bomb_is_refused_at_its_first_alias() -> None:
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60))
    assert error_of(bomb, "yaml").line == 2


def test_an_empty_file_is_an_empty_table() -> None:
    for format in ("toml", "yaml"):
        assert parse_document("", format).value == {}
        assert parse_document("# nothing\n", format).value == {}


def test_a_format_that_is_unknown_is_refused() -> None:
    with pytest.raises(UsageError, match="xml"):
        parse_document("{}", "xml")  # type: ignore[arg-type]


@pytest.mark.parametrize("format", ["toml", "yaml"])
@pytest.mark.parametrize(
    "text",
    [
        "[" * 4_000_000,
        "a." * 2_000_000,
        "a=" + "[" * 4_000_000,
        "[[n]]\n" * 600_000,
        "a: {" * 1_000_000,
        "é" * 4_000_000,
    ],
    ids=["brackets", "dots", "arrays", "tables", "maps", "too large"],
)
def test_files_made_to_exhaust_the_reader_are_refused_with_little_work(text: str, format: Format) -> None:
    assert counted_calls(lambda: error_of(text, format))[1] < 2_000_000


def test_a_file_is_read_by_its_suffix(tmp_path: Path) -> None:
    for name, text in (("a.toml", "x = 1"), ("a.yaml", "x: 1"), ("a.YML", "x: 1"), ("a.json", '{"x": 1}')):
        (tmp_path / name).write_text(text)
        assert read_document(tmp_path / name).value == {"x": 1}


def test_a_file_that_cannot_be_read_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "big.toml").write_bytes(b"#" * (4 * 2**20 + 1))
    (tmp_path / "latin.toml").write_bytes(b"a = 1\nb = '\xe9'\n")
    (tmp_path / "folder.toml").mkdir()
    cases = {
        "big.toml": "larger than 4 MB",
        "latin.toml": "latin.toml:2: is not UTF-8: byte 0xe9",
        "folder.toml": "cannot be read",
        "missing.toml": "cannot be read: No such file",
        "cluster.xml": "unknown suffix '.xml'",
    }
    for name, message in cases.items():
        with pytest.raises(InputFileError) as refusal:
            read_document(tmp_path / name)
        assert message in str(refusal.value)
        assert name in str(refusal.value)


JSON = """\
{
  "a": {"b": [1, -2.5e3], "c": null},
  "rows": [
    {"n": 1},
    [true,
     false, "\\u00e9"]
  ]
}
"""


def test_every_key_of_a_json_file_has_its_line() -> None:
    document = parse_document(JSON, "json")
    assert document.value == {"a": {"b": [1, -2500.0], "c": None}, "rows": [{"n": 1}, [True, False, "é"]]}
    lines = {".".join(map(str, path)): line for path, line in document.lines.items()}
    assert lines == {
        **{"a": 2, "a.b": 2, "a.c": 2, "rows": 3},
        **{"rows.0": 4, "rows.0.n": 4, "rows.1": 5, "rows.1.0": 5, "rows.1.1": 6},
    }
    assert document.line_of(("rows", 1, 2)) == 5


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "must be a JSON object"),
        ("[1]", 1, "must be a JSON object"),
        ('{"a": 1,\n "a": 2}', 2, "'a' is given twice"),
        ('{"a":\nNaN}', 2, "NaN is not a finite number"),
        ('{"a": -Infinity}', 1, "-Infinity is not a finite number"),
        ('{"a": [1,\n1e999]}', 2, "1e999 is not a finite number"),
        ('{"a": [1, 1e999]}', 1, "1e999 is not a finite number"),
        ('{"a": 01}', 1, "expected ',' or '}'"),
        ('{"a": 1,}', 1, "expected a key"),
        ('{"a": [1, 2,]}', 1, "expected a value"),
        ('{"a" 1}', 1, "expected ':'"),
        ('{"a": "\\ud800"}', 1, "half of a surrogate pair"),
        ('{"a": "x\ny"}', 1, "Invalid control character"),
        ('{"a": "x', 1, "Unterminated string"),
        ("{}\nx", 2, "after the end"),
        ('{"a": ' + "[" * 40 + "]" * 40 + "}", 1, "more than 32 levels"),
        ('{"a": ' + "9" * 5000 + "}", 1, "more than 100 digits"),
        ('{"a": [' + "9" * 5000 + "]}", 1, "more than 100 digits"),
        ('{"a": [' + "0," * 300_000 + "0]}", 1, "more than 300000 values"),
        ("{" + " " * 2**22 + "}", None, "larger than 4 MB"),
    ],
)
def test_json_is_read_strictly(text: str, line: int | None, message: str) -> None:
    error = error_of(text, "json")
    assert message in error.message
    assert error.line == line


def test_what_is_written_as_json_reads_back() -> None:
    value = {"rows": [[1.5, 2] * 40, {"x": None, "y": "é\n"}], "empty": {}, "none": []}
    assert parse_document(format_json(value), "json").value == value
    with pytest.raises(UsageError, match="JSON"):
        format_json({"a": float("nan")})
