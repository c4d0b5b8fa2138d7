"""What every test runs under. The environment comes first: Triton reads it when it is first imported."""

import importlib.util
import os

if "PYTEST_XDIST_WORKER" in os.environ:  # as many workers as cores: threads of their own would fight
    os.environ["OMP_NUM_THREADS"] = "1"

import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
os.environ["XDG_CONFIG_HOME"] = os.devnull  # no models.toml of the user's; a test that needs one names it
os.environ["PAGED_NO_WEIGHTS_CACHE"] = "1"  # a test that keeps packed weights names a folder

import pytest  # noqa: E402

if not HAS_GPU and importlib.util.find_spec("triton"):
    from tests.support.interpreter import remember_builtins

    remember_builtins()

# A worker takes one file after another. These take longest: begun last, they would leave the others idle.
LONGEST_FIRST = [
    "test_aot",
    "test_fake_cuda",
    "test_mutants",
    "test_late_cuda",
    "test_on_gpu",
    "test_attention_variants",
    "test_matches_transformers",
    "test_paged_attention",
    "test_block_properties",
    "test_strangers_corpus",
    "test_cli",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(LONGEST_FIRST)))
    skip = pytest.mark.skip(reason="needs a CUDA or ROCm GPU, torch.cuda sees none")
    for item in items:
        if not HAS_GPU and item.get_closest_marker("gpu"):  # not the keywords: a folder is named gpu
            item.add_marker(skip)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    torch.manual_seed(0)  # fixtures of a module draw the same, whatever this worker ran before


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)


def _fill_with_nan(tensor: torch.Tensor) -> None:
    plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.is_contiguous()
    if plain:  # past torch, where a recorder would see it compute
        tensor.detach().view(-1).view(torch.uint8).numpy().fill(0xFF)
    else:
        with torch.no_grad():
            tensor.fill_(float("nan"))


@pytest.fixture(autouse=True)
def _uninitialised_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what torch.empty gives with NaN: a value read before it was written shows in the result."""

    def poisoned(empty):
        def allocate(*args, **kwargs):
            tensor = empty(*args, **kwargs)
            if tensor.dtype.is_floating_point and tensor.device.type != "meta":
                _fill_with_nan(tensor)
            return tensor

        return allocate

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
