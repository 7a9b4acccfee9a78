"""What YAML makes of a recipe's text: its traps, and files that are made to break a reader. Nothing is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.loading import load_recipe
from tests.config.test_loading import QUICKSTART, errors_of

# 9 ** 9 values in nine lines.
ALIASES = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "\n".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def written(tmp_path: Path, lines: bytes | str) -> Path:
    """The quickstart's recipe with some lines in front, and how many lines that are."""
    path = tmp_path / "recipe.yaml"
    front = lines.encode("utf-8", "surrogatepass") if isinstance(lines, str) else lines
    path.write_bytes(front + b"\n" + QUICKSTART.read_bytes())
    return path


# --- values that YAML reads as other values than are meant -------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("run.seed=017", "write 17, or '017' in quotes where text is meant"),
        ("run.seed=+007", "write +7, or '+007' in quotes where text is meant"),
        ("run.seed=018", "write 18, or '018' in quotes where text is meant"),
        ("run.seed=0b11", "write 3, or '0b11' in quotes where text is meant"),
        ("run.seed=-0b1_0", "write -2, or '-0b1_0' in quotes where text is meant"),
        ("run.name=0B11", "write 3, or '0B11' in quotes where text is meant"),
        ("reward.arguments.a=0O17", "write 15, or '0O17' in quotes where text is meant"),
        ("run.steps=1:30", "write the number out, or '1:30' in quotes where text is meant"),
        (
            "run.timeout_s=2:30:00.5",
            "write the number out, or '2:30:00.5' in quotes where text is meant",
        ),
        ("train.megatron.a=off", "write false, or 'off' in quotes where text is meant"),
        ("train.megatron={a: [1, {b: Yes}]}", "write true, or 'Yes' in quotes where text is meant"),
        (
            "reward.by_source.x={function: a:b, arguments: {a: On}}",
            "write true, or 'On' in quotes where text is meant",
        ),
        (f"run.seed={'1' * 5000}", "write a smaller one"),
    ],
    ids=lambda value: value[:30],
)
def test_a_value_that_is_read_in_two_ways_is_refused_once_with_its_line(
    given: str, hint: str, tmp_path: Path
) -> None:
    (error,) = errors_of(QUICKSTART, given)
    assert error.where.startswith(f"override {given[:100]}")
    assert error.hint == hint
    key, _, value = given.partition("=")
    tree = value
    for part in reversed(key.split(".")):
        tree = f"{{{part}: {tree}}}"
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text(f"# a comment\n\n{tree}\n")
    (error,) = errors_of(QUICKSTART, str(overlay))
    assert (error.where, error.hint) == (f"{overlay}:3", hint)


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("train.replay", "off", "off"),
        ("reshard.verify", "off", "off"),
        ("run.name", "2026-01-01", "2026-01-01"),
        ("run.name", "yes", "yes"),
        ("run.name", "'017'", "017"),
        ("run.name", "'0o17'", "0o17"),
        ("data.answer", "'1:30'", "1:30"),
        ("run.seed", "0", 0),
        ("run.seed", "0x1F", 31),
        ("run.seed", "1_000", 1000),
        ("train.lr", "1e-3", 1e-3),
        ("train.optimizer_offload", "True", True),
        ("reward.arguments", "{a: 'off', b: true, c: 10.0.0.1:30, d: 2026-13-45}",
         {"a": "off", "b": True, "c": "10.0.0.1:30", "d": "2026-13-45"}),
    ],
)  # fmt: skip
def test_what_has_one_meaning_is_read_so(key: str, value: str, read: object) -> None:
    section, _, name = key.partition(".")
    assert getattr(getattr(load_recipe(QUICKSTART, [f"{key}={value}"]), section), name) == read


def test_a_word_where_a_boolean_is_wanted() -> None:
    (error,) = errors_of(QUICKSTART, "train.optimizer_offload=yes")
    assert str(error).endswith("train.optimizer_offload is 'yes'; write true or false")


# --- texts that are made to break a reader -----------------------------------------------------------------------


@pytest.mark.parametrize("depth", [40, 3_000, 100_000])
@pytest.mark.parametrize("brackets", ["[]", "{}", "dashes", "indented"])
def test_a_recipe_that_is_nested_too_deep_is_one_line(
    depth: int, brackets: str, tmp_path: Path
) -> None:
    text, line = {
        "[]": ("a: " + "[" * depth, 1),
        "{}": ("a: " + "{a: " * depth, 1),
        "dashes": ("a:\n" + "- " * depth + "1", 2),
        "indented": ("\n".join(" " * level + "a:" for level in range(min(depth, 500))), 32),
    }[brackets]
    (error,) = errors_of(written(tmp_path, text))
    assert str(error) == (
        f"{tmp_path}/recipe.yaml:{line}: mappings and lists are nested more than 32 deep, and no key of a recipe is; "
        "take the nesting out"
    )


def test_an_override_that_is_nested_too_deep_is_one_short_line() -> None:
    (error,) = errors_of(QUICKSTART, f"train.megatron.a={'[' * 100_000}")
    assert "nested more than 32 deep" in str(error) and len(str(error)) < 400
    (error,) = errors_of(QUICKSTART, f"train.megatron{'.a' * 100_000}=1")
    assert "not of the form a.b=c" in str(error) and len(str(error)) < 400


@pytest.mark.parametrize(
    ("front", "line", "says"),
    [
        (b"# one\nx: \xed\xa0\x80", 2, "not UTF-8 text (the byte 0xed); save the file as UTF-8"),
        (b"# one\nx: \xff", 2, "not UTF-8 text (the byte 0xff); save the file as UTF-8"),
        ('# one\n\nreward: {arguments: {a: "x\\ud800"}}', 3, "the text has the character U+D800; remove it"),
        ('x: 1\n"\\udfff": 1', 2, "a key is not printable text on one line; write a recipe's key"),
        ("x: 1\ny: a\x07b", 2, "not valid YAML (the character U+0007 is not allowed); remove it"),
        ('x: "a\\0b"', 1, "the text has the character U+0000; remove it"),
        ("x: 1\n? [a]\n: 1", 2, "a key is not printable text on one line"),
        ("x: 1\ny: !!int abc", 2, "not valid YAML for a recipe (the tag '!!int'); write the value without a tag"),
        ("x: !!timestamp 2026-99-99", 1, "not valid YAML for a recipe (the tag '!!timestamp')"),
        ("x: !!set {a}", 1, "not valid YAML for a recipe (the tag '!!set')"),
        ("x: !!python/name:os.system ''", 1, "not valid YAML for a recipe (the tag "),
        ("x: =", 1, "not valid YAML (could not determine a constructor"),
        ("x: 1\n---\ny: 1\n---", 2, "not valid YAML (but found another document)"),
        (ALIASES, 1, "it has more than 20000 values, which no recipe has"),
    ],
)  # fmt: skip
def test_a_text_that_no_recipe_is_names_file_and_line(
    front: bytes | str, line: int, says: str, tmp_path: Path
) -> None:
    path = written(tmp_path, front)
    messages = [str(error) for error in errors_of(path)]
    assert any(text.startswith(f"{path}:{line}: {says}") for text in messages), messages


def test_an_override_whose_text_is_no_utf8() -> None:
    # as Python reads the byte 0xff of the command line
    (error,) = errors_of(QUICKSTART, "run.name=a\udcffb")
    assert error.problem == "not valid YAML (the character U+DCFF is not allowed)"


def test_a_byte_order_mark_in_front_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + QUICKSTART.read_bytes())
    assert load_recipe(path) == load_recipe(QUICKSTART)
    overlay = tmp_path / "overlay.yaml"
    overlay.write_bytes(b"\xef\xbb\xbfrun: {seed: 9}\n")
    assert load_recipe(path, [str(overlay)]).run.seed == 9
    overlay.write_text("run: {name: a\ufeff}\n")
    (error,) = errors_of(path, str(overlay))
    assert str(error) == f"{overlay}:1: the text has the character U+FEFF; remove it"


def test_a_file_without_an_end_and_a_folder(tmp_path: Path) -> None:
    assert "it has more than 1048576 bytes" in str(errors_of(Path("/dev/zero"))[0])
    assert "No such file" in str(errors_of(tmp_path / "none.yaml")[0])
    assert "Is a directory" in str(errors_of(tmp_path)[0])
    assert "File name too long" in str(errors_of(tmp_path / ("a" * 300))[0])


def test_aliases_and_merged_mappings_are_read(tmp_path: Path) -> None:
    path = tmp_path / "overlay.yaml"
    path.write_text("train: &a {lr: 2e-4, warmup_steps: 3}\ncritic: {<<: *a, lr: 1e-4}\n")
    recipe = load_recipe(QUICKSTART, [str(path)])
    assert (recipe.train.lr, recipe.critic.lr, recipe.critic.warmup_steps) == (2e-4, 1e-4, 3)
