"""Upcycling: gives models with one stream several, without changing their outputs.

Such a folder of transformers is what `save_pretrained` writes: the tensors of the sites are among the others, and
`config.json` has an entry "temper" that says where they belong, so the checkpoints of any trainer are complete.

Letters: B batch, T token, V vocabulary.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

import temper
from temper.carrier import WrapError
from temper.pretrained import ENTRY
from temper.registry import unknown
from temper_lab.interop.hf_folder import is_hf_folder, is_upcycled, read_hf
from temper_lab.io import atomic_dir, check_finite, entry, read_json
from temper_lab.method import Method
from temper_lab.model import GPT, ModelConfig
from temper_lab.tokenizer import FILE_NAME, Tokenizer
from temper_lab.train import model_dir
from temper_lab.train.model_dir import load

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Layout(NamedTuple):
    """The names of the blocks, as `temper.wrap` takes them, and the residual additions of each."""

    blocks: str
    sites: int = 2


_LLAMA, _GPT2 = Layout("model.layers.*"), Layout("transformer.h.*")

# Keyed by `model_type`. A test compares the logits of every one with its original.
LAYOUTS = {
    **dict.fromkeys(("llama", "mistral", "ministral", "mixtral", "qwen2", "qwen3", "qwen3_moe"), _LLAMA),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "granite", "smollm3", "starcoder2"), _LLAMA),
    **dict.fromkeys(("olmo", "olmo2", "olmo3", "phi3", "nanochat"), _LLAMA),
    **dict.fromkeys(("gpt2", "gpt_neo"), _GPT2),
    # Attention and MLP in parallel, added together.
    "gpt_neox": Layout("gpt_neox.layers.*", sites=1),
    "phi": Layout("model.layers.*", sites=1),
}


def layout_of(config: Any, blocks: str | None = None, sites: int | None = None) -> Layout:
    """The layout of a model of transformers, from the table or as given."""
    known = LAYOUTS.get(config.model_type)
    if blocks is None and known is None:
        raise ValueError(
            f"{unknown('architecture', config.model_type, LAYOUTS)} Another pre-norm model needs the names of its "
            'blocks and the residual adds of one: --blocks "model.layers.*" --sites 2, or in Python temper.wrap(model, '
            '"model.layers.*", preset=.., num_streams=.., sites=2) and then temper.convert.upcycle(model)'
        )
    default = known or Layout("")
    return Layout(default.blocks if blocks is None else blocks, default.sites if sites is None else sites)


def upcycle_gpt(
    model: GPT, *, preset: str, num_streams: int, router: Mapping[str, Any] | None = None, seed: int = 0
) -> GPT:
    """Copies a model with one stream to one with N streams and the same logits.

    Our model norms the sum of its streams, N times what it was, so the logits differ by the effect of that norm's
    eps, a relative 5e-7 (docs/math.md).

    Args:
        preset: how the streams are routed.
        router: changes of the preset, as for `temper.preset`.
        seed: of the generators' random factors.
    """
    if not model.config.routing().is_residual:
        raise ValueError(
            f"the model has {model.num_streams} streams of {model.config.method} already; expected one stream "
            "(`grow_gpt` gives it a multiple of its streams)"
        )
    check_streams(preset, num_streams)
    config = model.config.with_(preset=preset, num_streams=num_streams, router=dict(router or {}))
    grown = _like(model, config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        temper.convert.upcycle(grown)
    return grown


def grow_gpt(model: GPT, num_streams: int) -> GPT:
    """Copies a model to one with a multiple of its streams, the same preset and ranks, and nearly the same logits.

    A branch reads k times what it read, which its norm removes up to eps, and the copies of a stream are written with
    biases that are 2^-10 apart, without which they would stay copies.
    """
    sites = [temper.convert.grow(site, num_streams) for site in model.sites()]
    config = sites[0].config
    if any(site.config != config for site in sites):
        raise ValueError("the sites of this model are not all alike, so that no one configuration holds the grown ones")
    # Ranks are kept, although the preset would choose others for more streams.
    usual = temper.preset(model.config.preset, num_streams=num_streams, dim=config.dim).to_dict()
    router = {key: value for key, value in config.to_dict().items() if value != usual[key]}
    grown = _like(model, model.config.with_(num_streams=num_streams, router=router))
    for new, site in zip(grown.sites(), sites, strict=True):
        new.load_state_dict(site.state_dict())
    return grown


def check_streams(preset: str, num_streams: int) -> None:
    """Raises ValueError for a preset that has one stream only."""
    if num_streams < 2:
        raise ValueError(f"streams is {num_streams}; expected 2 or more: one stream is the model as it is")
    if temper.preset(preset, num_streams=num_streams, dim=8).is_residual:
        raise ValueError(
            f"the preset {preset!r} has one stream, whatever is asked for; expected one that routes several"
        )


def _like(model: GPT, config: ModelConfig) -> GPT:
    """A model with this configuration and the backbone of another; its sites have no values yet."""
    like = model.head.weight
    with torch.device("meta"):
        grown = GPT(config).to(like.dtype)
    grown.to_empty(device=like.device)
    grown.rotary.reset_parameters()
    routing = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, temper.HyperConnection))
    backbone = {key: value for key, value in model.state_dict().items() if not key.startswith(routing)}
    _, unexpected = grown.load_state_dict(backbone, strict=False)
    assert not unexpected
    return grown.train(model.training)


def upcycle_hf(
    model: PreTrainedModel,
    *,
    preset: str,
    num_streams: int,
    router: Mapping[str, Any] | None = None,
    blocks: str | None = None,
    sites: int | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """Gives a causal language model of transformers N streams, in place, with the same logits.

    It trains, generates and is saved as before; `hf_folder.load_upcycled` reads what `save_pretrained` has written.

    Args:
        preset: how the streams are routed.
        router: changes of the preset, as for `temper.preset`.
        blocks: the names of its blocks (`temper.wrap`), for an architecture that is not in the table of layouts.
        sites: the residual adds of one block.
        seed: of the generators' random factors.
    """
    if getattr(model.config, ENTRY, None) is not None:
        raise ValueError("the model has streams already; expected one as transformers has it")
    check_streams(preset, num_streams)
    layout = layout_of(model.config, blocks, sites)
    dim = model.config.get_text_config().hidden_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        options: dict[str, Any] = {"preset": preset, "num_streams": num_streams, "dim": dim, "sites": layout.sites}
        temper.wrap(model, layout.blocks, **options, reduce="mean", **(router or {}))
        temper.convert.upcycle(model)
    return model


# The files of a tokenizer of transformers.
TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model"),
    "chat_template*",
)


class Upcycled(NamedTuple):
    """The result of an upcycling: the largest difference of a logit on a few tokens, and the largest logit."""

    kind: str
    parameters: int
    added: int
    difference: float
    largest: float
    note: str = ""


def upcycle_folder(
    source: Path, out: Path, *, preset: str, num_streams: int, layout: Mapping[str, Any], **options: Any
) -> Upcycled:
    """Reads a model, upcycles it, compares the logits and writes it; nothing is written if they differ.

    Args:
        source: a model folder or a run of this lab, or a folder of transformers.
        out: a folder that does not exist or is empty.
        layout: `blocks` and `sites` for a model of transformers; None where the table knows them.
        options: `router` and `seed`.
    """
    check_streams(preset, num_streams)
    check_out(out)
    options = {"preset": preset, "num_streams": num_streams, **options}
    if not is_hf_folder(source):
        if given := [f"--{name}" for name, value in layout.items() if value is not None]:
            raise ValueError(f"{' and '.join(given)} describe a model of transformers, and {source} is one of this lab")
        return _upcycle_lab_folder(*load(source), out, options)
    # Imported early: where transformers is missing, this says what to install.
    from temper_lab.interop import hf

    if is_upcycled(source):
        raise ValueError(f"{source} has streams already; upcycle the model that it was made from")
    kind = entry(read_json(source / "config.json", allow_nan=True), "model_type", str, source / "config.json")
    if kind == "temper":
        raise ValueError(
            f"{source} is an export of a model of this lab; upcycle the model folder that it was made from"
        )
    hf.transformers.utils.logging.disable_progress_bar()
    note = ""
    if kind == "nanochat":
        try:
            model, tokenizer = _from_nanochat(source)
        except ValueError as reason:
            note = f"it stays a model of transformers: {reason}"
        else:
            return _upcycle_lab_folder(model, tokenizer, out, options)
    return _upcycle_hf_folder(source, out, {**options, **layout})._replace(note=note)


def check_out(out: Path) -> None:
    """Raises ValueError for a folder that is not empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not empty; expected a new folder")


def _upcycle_lab_folder(model: GPT, tokenizer: Tokenizer, out: Path, options: dict[str, Any]) -> Upcycled:
    config = model.config
    if config.routing().is_residual:
        grown = upcycle_gpt(model, **options)
    elif str(Method.of(options["preset"], options.get("router") or {})) not in (config.preset, config.method):
        raise ValueError(
            f"the model has {model.num_streams} streams of {config.method} already; expected --preset {config.preset} "
            f"and --streams {2 * model.num_streams} or another multiple, which keeps its routing"
        )
    else:
        grown = grow_gpt(model, options["num_streams"])
    ids_BT = _probe(config.vocab_size, config.context)
    with torch.no_grad():
        difference, largest = _compare(model(ids_BT), grown(ids_BT))
    files = {FILE_NAME: tokenizer.to_json()}
    model_dir.save_model(out, grown.config.to_dict(), grown.state_dict(), files)
    return Upcycled("a model folder", _count(grown), _count(grown) - _count(model), difference, largest)


def _from_nanochat(source: Path) -> tuple[GPT, Tokenizer]:
    from temper_lab.interop.nanochat import from_nanochat

    # The lab's tokenizer adds BOS on request; transformers' post-processor always adds one.
    content = read_json(source / FILE_NAME, allow_nan=True) if (source / FILE_NAME).is_file() else {}
    tokenizer = Tokenizer.from_json(json.dumps({**content, "post_processor": None}), source / FILE_NAME)
    model = from_nanochat(source)
    if model.config.vocab_size != tokenizer.vocab_size:
        raise ValueError(f"the model has {model.config.vocab_size} tokens and its tokenizer {tokenizer.vocab_size}")
    return model.eval(), tokenizer


@torch.no_grad()
def _upcycle_hf_folder(source: Path, out: Path, options: dict[str, Any]) -> Upcycled:
    model = read_hf(source).eval()
    before = _count(model)
    config = model.config.get_text_config()
    ids_BT = _probe(config.vocab_size, getattr(config, "max_position_embeddings", None) or 32)
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
    try:
        upcycle_hf(model, **options)
        again_BTV = model(input_ids=ids_BT, use_cache=False).logits
    except WrapError as error:
        raise ValueError(f"the blocks are not what --blocks and --sites say: {error}") from error
    difference, largest = _compare(logits_BTV, again_BTV)
    check_finite(model.state_dict(), "the model")
    with atomic_dir(out.absolute()) as work:
        model.save_pretrained(work)
        for pattern in TOKENIZER_FILES:
            for path in source.glob(pattern):
                shutil.copyfile(path, work / path.name)
    return Upcycled(
        "a folder for temper_lab.interop.hf_folder.load_upcycled",
        _count(model),
        _count(model) - before,
        difference,
        largest,
    )


def _probe(vocab_size: int, limit: int) -> Tensor:
    """A few tokens, the same every time."""
    return torch.randint(vocab_size, (2, min(32, limit)), generator=torch.Generator().manual_seed(0))


def _compare(before_BTV: Tensor, after_BTV: Tensor) -> tuple[float, float]:
    """The largest difference of a logit and the largest logit, or a ValueError if that is more than rounding."""
    difference = float((after_BTV.double() - before_BTV.double()).abs().max())
    largest = float(before_BTV.abs().max())
    # Rounding grows with depth, while an error is as large as the logits. Growing is exact to 1e-5 only.
    limit = largest * min(0.25, max(1e-5, 4096 * torch.finfo(before_BTV.dtype).eps))
    if not difference <= limit:
        raise ValueError(
            f"the logits changed by {difference:.1e} (they are up to {largest:.1e}), which is more than rounding "
            f"({limit:.1e}): the blocks do more to their input than to add to it. Nothing was written."
        )
    return difference, largest


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
