"""The command that compares a checkpoint that sees images with transformers."""

from tests import real_images
from tests.real_images import Comparison, main
from tests.support.images import picture, png, seeing


def test_a_checkpoint_is_compared_by_a_file(tmp_path, capsys, monkeypatch):
    file = tmp_path / "a.png"
    file.write_bytes(png(picture(1)))
    arguments = [str(seeing("qwen3_vl")), str(file), "--tokens", "3"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "a.png" in shown
    assert "patches equal, embeddings within" in shown
    assert "tokens equal\n0 of 1 pictures differ" in shown
    monkeypatch.setattr(real_images, "row_by_row", lambda _vision, patches, *_size: patches + 1)
    assert main(arguments) == 1
    assert "patches DIFFERENT" in capsys.readouterr().out


def test_tokens_may_differ_where_two_are_as_likely():
    same = Comparison(9, True, 1e-6, None, 0.0)
    parted = same._replace(parting=2, margin=0.01)
    assert [each.is_failure(0.001) for each in (same, parted, same._replace(has_equal_patches=False))] == [
        *(False, True, True)
    ]
    assert not parted.is_failure(0.1)
    assert "tokens part after 2, where two logits are 0.01 apart" in str(parted)
