"""models.toml: its entries, its errors with their lines, and its changes."""

from __future__ import annotations

import math

import pytest

from paged.base.durations import parse_duration
from paged.base.errors import ConfigError, MissingModelError, RequestError
from paged.checkpoints.library.models_file import ModelEntry, ModelsFile
from paged.checkpoints.library.names import check_is_here, entry_of, located

WHOLE = """\
# mine
[small]
checkpoint = "demo"
system = "Be brief."
keep_alive = "10m"

[small.engine]
max_model_len = 256
[small.sampling]
temperature = 0.2

["qwen:4b"]
checkpoint = "Qwen/Qwen3-4B"
keep_alive = -1
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "models.toml"
    path.write_text(WHOLE)
    return path


def test_entries(path):
    file = ModelsFile(path)
    small = entry_of("SMALL", file)
    assert (small.name, small.checkpoint, small.keep_alive) == ("small", "demo", 600.0)
    assert (small.engine, small.sampling) == ({"max_model_len": 256}, {"temperature": 0.2})
    assert file.find("qwen:4b").keep_alive == math.inf
    assert file.find("none") is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('system = "Be', 'sistem = "Be', r"line 4: \[small\] has no key 'sistem'; did you mean system\?"),
        ("max_model_len", "max_modle_len", r"line 8: \[small.engine\] has no key 'max_modle_len'; did you"),
        ("= 256", "= 0", r"line 8: max_model_len must be at least 1, got 0"),
        ("= 0.2", "= -1", r"line 10: temperature must be"),
        ('"10m"', '"soon"', r"line 5: keep_alive must be a number of seconds or a duration"),
        ('"demo"', "5", r"line 3: checkpoint must be a text, got 5"),
        ('checkpoint = "demo"\n', "", r"line 2: \[small\] has no checkpoint"),
        ('"demo"', '"Small"', r"line 3: the checkpoint of small is 'Small', its own name"),
        ('"Qwen/Qwen3-4B"', '"small"', r"line 13: the checkpoint of qwen:4b is 'small', another model"),
        ('["qwen:4b"]', "[Small]", r"line 12: Small is the name of a model in line 2 already"),
        ('["qwen:4b"]', "[small]", r"Cannot declare"),
        ('["qwen:4b"]', '["../qwen"]', r"line 12: '../qwen' cannot name a model"),
        ('["qwen:4b"]', '["a/b"]', r"line 12: 'a/b' cannot name a model"),
        ('["qwen:4b"]', "[demo]", r"line 12: 'demo' cannot name a model"),
        ("# mine", "a = 1", r"line 1: 'a' is not a table"),
        ("[small]", "[small", r"line 2"),
    ],
)
def test_what_is_wrong_has_its_line(path, old, new, message):
    path.write_text(WHOLE.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        ModelsFile(path)


def test_checkpoints_that_are_here(path, tmp_path, monkeypatch):
    """A short name takes what is in the cache; what is nowhere is one error, and the hub is not asked."""
    file = ModelsFile(path)
    entry = ModelEntry(name="x", checkpoint="thing")
    snapshot = tmp_path / "models--owner--Thing" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert located(entry).checkpoint == str(snapshot)
    full = ModelEntry(name="x", checkpoint="owner/Thing")
    assert located(full) is full
    for each in (located(entry), full, ModelEntry(name="x", checkpoint="demo")):
        check_is_here(each)
    file.set("short", "thing")
    assert entry_of("short", file).checkpoint == str(snapshot)
    for missing, message in (("owner/none", "paged pull owner/none"), ("./none", "no such directory")):
        with pytest.raises(MissingModelError, match=message):
            check_is_here(ModelEntry(name="x", checkpoint=missing))


def test_a_named_file_must_exist(tmp_path, monkeypatch):
    assert ModelsFile(tmp_path / "none.toml").entries == {}
    monkeypatch.setenv("PAGED_MODELS", str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match=r"none\.toml: no such file of models"):
        ModelsFile.of_user()


def test_changes_keep_what_is_written(path):
    file = ModelsFile(path)
    file.set("copy.1", "small")  # its options too
    assert ModelsFile(path).find("copy.1").engine == {"max_model_len": 256}
    assert path.read_text().startswith(WHOLE)
    for name, checkpoint, message in (
        ("small", "demo", "is the name of a model"),
        ("a", "a", "alias of itself"),
        ("../a", "demo", "cannot name"),
        ("a", "", "is no directory"),
    ):
        with pytest.raises(ConfigError, match=message):
            file.set(name, checkpoint)
    assert file.remove("SMALL")
    assert not file.remove("small")
    assert [*ModelsFile(path).entries] == ["qwen:4b", "copy.1"]
    assert path.read_text().startswith("# mine\n[")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (5, 5),
        (0, 0),
        (-1, math.inf),
        ("-1", math.inf),
        ("0", 0),
        ("5m", 300),
        ("1h30m", 5400),
        ("-1m", math.inf),
        ("1.5s", 1.5),
        ("250ms", 0.25),
        (2.5, 2.5),
    ],
)
def test_durations(value, seconds):
    assert parse_duration("keep_alive", value) == seconds


@pytest.mark.parametrize(
    "value", [True, None, "", "soon", "5 m", "5m!", "m", [], {}, math.nan, 10**30, "5" * 70]
)
def test_no_durations(value):
    with pytest.raises(RequestError, match="keep_alive must be a number of seconds or a duration"):
        parse_duration("keep_alive", value)
