"""Write the trained weights as a Hugging Face checkpoint, on all training ranks at once, in fp8 tiles if asked.

The planner and the executor of resharding gather whole tensors, file by file: in each wave every rank collects the
tensors of at most one file, writes it and frees it, so that no rank ever holds more than one file.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from megarl.checkpoints import kept_tensors
from megarl.checkpoints.hf_files import header
from megarl.device import DEVICE
from megarl.model.families import family_of, name_in_files
from megarl.model.lora_pairs import LoraSize, split_factors
from megarl.model.precision import PLAIN, Precision, fp8_config
from megarl.model.quantisation import QUANTISATION_KEYS
from megarl.model.rope import with_rope_scaling
from megarl.model.shape import ModelShape
from megarl.model.tensors import aliases, file_shape, hf_tensors, tensors
from megarl.placement.train_layout import TrainLayout
from megarl.resharding import fp8, megatron_map
from megarl.resharding.agreement import Agreement
from megarl.resharding.execute import Executor
from megarl.resharding.lora_merge import Merge
from megarl.resharding.reshard_plan import agreed_rounds, item_bytes, plan_streams
from megarl.resharding.shards import Part, Shard, cells, param_table, verify_params
from megarl.resharding.transport import close_group, make_group
from megarl.types import UserError
from megarl.types.json_objects import JsonObject
from megarl.types.tensors import NamedTensors

FILE_BYTES = 4 << 30
COPIED = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")  # configuration and tokenizer
INDEX = "model.safetensors.index.json"
File = tuple[Shard, ...]  # the tensors of one file; a shard's param is the name in the file


@dataclass(frozen=True)
class Export:
    """An export as each rank gets it; only `rank` differs. dtype: torch's name of the files' data type.

    precision: the formats of the weights; fp8 is tiles of 128 x 128 with float32 scales, as DeepSeek-V3 is published.
    source: the checkpoint folder whose configuration and tokenizer files are copied. folder: on a file system that all
    ranks share; must not exist yet.
    """

    folder: str
    source: str
    shape: ModelShape
    layout: TrainLayout
    rank: int
    transformer_engine: bool
    dtype: str
    gpus_per_node: int
    timeout_s: float
    precision: Precision = PLAIN
    file_bytes: int = FILE_BYTES
    round_bytes: int = 512 << 20
    lora: LoraSize | None = None  # adapters, which are merged into the weights
    rope_scaling: JsonObject | None = None  # in place of config.json's


def export_hf(job: Export, params: NamedTensors, store: Store) -> Path:
    """Write the checkpoint; every training rank calls it with its own parameters. Returns the folder.

    The folder is renamed to its final name when all files are complete. store: a prefix store of this call alone.
    Raises LayoutError: parameters that the map does not describe; UserError: the folder exists; RuntimeError with the
    message of another rank that failed.
    """
    agreement = Agreement(
        PrefixStore("agree", store), job.rank, job.layout.world_size, job.timeout_s
    )
    files = plan_files(job.shape, job.dtype, job.file_bytes, stacks=not job.precision.is_quantised)
    folder = Path(job.folder)
    unfinished = folder.with_name(folder.name + ".unfinished")
    waves = [f"wave {index}" for index in range(math.ceil(len(files) / job.layout.world_size))]
    group = None
    try:
        params, merge = _merged(job, params)
        num_files = len(files) + len(kept_tensors.names_by_file(job.source, job.shape))
        if job.rank == 0:
            if folder.exists():
                raise UserError(str(folder), "exists already", "name another folder or remove it")
            if unfinished.exists():
                shutil.rmtree(unfinished)  # left by an export that was interrupted
            unfinished.mkdir(parents=True)
        agreement.reach("begin", {}, lambda votes: {})
        group = make_group(
            PrefixStore("group", store), job.rank, job.layout.world_size, job.timeout_s
        )
        for wave, stage in enumerate(waves):
            _write_wave(
                job, params, merge, agreement, stage, group, files, num_files, wave, unfinished
            )
        agreement.reach("written", {}, lambda votes: {})
        if job.rank == 0:
            _finish(job, files, unfinished, folder)
        agreement.reach("end", {}, lambda votes: {})
    except Exception as error:
        for stage in ("begin", *waves, "written", "end"):  # stages that have ended stay as they are
            agreement.refuse(stage, f"cannot export: {error}")
        raise
    finally:
        if group is not None:
            close_group(group)
    return folder


def _merged(job: Export, params: NamedTensors) -> tuple[dict[str, Tensor], Merge | None]:
    """This rank's weights, and its adapters. Raises LayoutError where the maps do not describe them."""
    weights, factors = split_factors(params)
    shards = megatron_map.shards(job.shape, job.layout, job.rank, job.transformer_engine)
    verify_params(shards, weights)
    if job.lora is None:
        return weights, None
    of_rank = job.shape, job.layout, job.rank, job.transformer_engine
    return weights, Merge.of_rank(job.lora, *of_rank, factors)


def plan_files(
    shape: ModelShape, dtype: str, file_bytes: int, *, stacks: bool = True
) -> list[File]:
    """The tensors in order, split into files of at most file_bytes; a larger tensor gets a file of its own.

    stacks: the experts of families whose files have stacks of them are written so.
    """
    files: list[list[Shard]] = [[]]
    size = 0
    for parts in _single_tensors(shape, stacks):
        num_bytes = sum(part.area * item_bytes(part.dtype or dtype) for part in parts)
        if files[-1] and size + num_bytes > file_bytes:
            files.append([])
            size = 0
        last = files[-1][-1] if files[-1] else None
        first, *_ = parts
        if last and last.param == first.param and last.items[1] == first.items[0]:
            files[-1][-1] = last._replace(items=(last.items[0], first.items[1]))
        else:
            files[-1] += parts
        size += num_bytes
    return [tuple(file) for file in files]


def _single_tensors(shape: ModelShape, stacks: bool) -> Iterator[list[Shard]]:
    """Each tensor of the files: the shards that it is made of, one but for stacks."""
    wrapper = family_of(shape).wrapper
    repeated = {name: [name_in_files(shape, name)] for name in tensors(shape)}
    for alias, name in aliases(shape).items():
        repeated[name].append(name_in_files(shape, alias))
    for name, (items, rows, cols) in tensors(shape).items():
        if name.endswith("e_score_correction_bias"):
            dtype = "float32"
        else:
            dtype = ""
        if stacks and wrapper and (of_stack := wrapper.stack_of(name)):
            (stack, parts) = of_stack
            if name == parts[0]:
                yield [
                    Shard(
                        part,
                        (0, rows),
                        (0, cols),
                        wrapper.in_files(stack),
                        (0, at * rows, 0),
                        (0, items),
                    )
                    for at, part in enumerate(parts)
                ]
            continue
        for param in repeated[name]:
            stack = Shard(name, (0, rows), (0, cols), param, items=(0, items), dtype=dtype)
            for item in range(items):
                yield [stack._replace(items=(item, item + 1), at=(item, 0, 0))]


def file_name(index: int, num_files: int) -> str:
    """Hugging Face's name of file `index` of a sharded checkpoint."""
    if num_files == 1:
        return "model.safetensors"
    return f"model-{index + 1:05d}-of-{num_files:05d}.safetensors"


def _write_wave(
    job: Export,
    params: NamedTensors,
    merge: Merge | None,
    agreement: Agreement,
    stage: str,
    group: Any,
    files: list[File],
    num_files: int,
    wave: int,
    folder: Path,
) -> None:
    """Every rank collects and writes its file of this wave, if the wave has one for it."""
    first = wave * job.layout.world_size
    size = job.layout.world_size
    of_wave = files[first : first + size]
    targets = [Part(file, (rank,)) for rank, file in enumerate(of_wave)]
    wave_names = {shard.name for file in of_wave for shard in file}
    sources = [
        Part(tuple(shard for shard in part.shards if shard.name in wave_names), part.members)
        for part in megatron_map.parts(job.shape, job.layout, job.transformer_engine)
    ]
    streams = plan_streams(
        sources, targets, job.rank, size, gpus_per_node=job.gpus_per_node, dtype=job.dtype
    )
    vote = {"rounds": streams.rounds_needed(job.round_bytes), "digest": str(streams.digest)}
    rounds = agreement.reach(stage, vote, _most_rounds)["rounds"]
    if job.rank < len(of_wave):
        rank_file = of_wave[job.rank]
    else:
        rank_file = ()
    tensors_of_file = _allocate(rank_file, job.dtype)
    executor = Executor(streams.assign(rounds), params, tensors_of_file, merge)
    executor.run(group, job.timeout_s, partial(agreement.ask, "written"))
    if rank_file:
        _quantise(job, tensors_of_file)
        name = file_name(first + job.rank, num_files)
        save_file(tensors_of_file, folder / name, metadata={"format": "pt"})


def _most_rounds(votes: Any) -> JsonObject:
    return {"rounds": agreed_rounds(votes, "export: the ranks'")}


def _allocate(file: File, dtype: str) -> dict[str, Tensor]:
    """Name -> uninitialised tensor, in the shape that it has in the file."""
    table = param_table(file)
    tensors_by_name = {}
    for shard in file:
        for name, _ in cells(shard):
            tensors_by_name[name] = torch.empty(
                file_shape(shard.name, table[name]),
                dtype=getattr(torch, shard.dtype or dtype),
                device=DEVICE,
            )
    return tensors_by_name


def _quantise(job: Export, tensors_of_file: dict[str, Tensor]) -> None:
    """Replace the weights that do not stay plain by their fp8 tiles and scales, one after the other."""
    quantised = {
        name_in_files(job.shape, name)
        for name in hf_tensors(job.shape)
        if not job.precision.is_plain(job.shape, name)
    }
    for name in quantised & tensors_of_file.keys():
        block = tensors_of_file[name].unsqueeze(0)
        tensors_of_file[name + fp8.SCALE_SUFFIX] = fp8.tile_scales(block, job.precision.scales)[0]
        tensors_of_file[name] = fp8.quantise(block, job.precision.scales)[0]


def _plain_modules(shape: ModelShape, precision: Precision) -> list[str]:
    """The modules with a matrix that stays as it is; the names are those of `modules_to_not_convert`."""
    matrices = [name for name, size in hf_tensors(shape).items() if len(size) == 2]
    matrices += aliases(shape)
    own = [
        name.removesuffix(".weight")
        for name in matrices
        if precision.is_plain(shape, name) and "embed_tokens" not in name
    ]
    # SGLang names the modules of some wrapped models as those of the language model alone
    plain = list(dict.fromkeys([*(name_in_files(shape, name) for name in own), *own]))
    return plain + [prefix.removesuffix(".") for prefix in kept_tensors.prefixes(shape)]


def _finish(job: Export, files: list[File], unfinished: Path, folder: Path) -> None:
    """Add what training kept, the index, the configuration and the tokenizer, then rename the folder."""
    kept = kept_tensors.names_by_file(job.source, job.shape)
    num_files = len(files) + len(kept)
    for index, (file, names_of_file) in enumerate(kept.items(), start=len(files)):
        kept_tensors.copy(file, names_of_file, unfinished / file_name(index, num_files))
    if num_files > 1:
        names: dict[str, str] = {}
        total = 0
        for index in range(num_files):
            file = unfinished / file_name(index, num_files)  # another node may have written it
            of_file, _ = header(file)
            names |= dict.fromkeys(of_file, file.name)
            total += max(tensor["data_offsets"][1] for tensor in of_file.values())
        weights = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
        (unfinished / INDEX).write_text(json.dumps(weights, indent=2), encoding="utf-8")
    for file in sorted(Path(job.source).iterdir()):
        if file.is_file() and file.suffix in COPIED and not file.name.endswith(".index.json"):
            shutil.copyfile(file, unfinished / file.name)
    config = json.loads((unfinished / "config.json").read_text(encoding="utf-8"))
    config = exported_config(config, job)
    (unfinished / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    unfinished.rename(folder)


def exported_config(config: JsonObject, job: Export) -> JsonObject:
    """The source's `config.json` with the exported weights' formats."""
    if wrapper := family_of(job.shape).wrapper:
        text = _reformatted(config[wrapper.config_key], job)
        config = _reformatted({**config, wrapper.config_key: text}, replace(job, rope_scaling=None))
    else:
        config = _reformatted(config, job)
    if job.precision.is_quantised:
        plain = _plain_modules(job.shape, job.precision)
        config[QUANTISATION_KEYS[0]] = fp8_config(plain, job.precision.scales)
    return config


def _reformatted(config: JsonObject, job: Export) -> JsonObject:
    """A config, or its language model's part, with the export's data type and positions, and no quantisation."""
    config = dict(with_rope_scaling(config, job.rope_scaling))
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = job.dtype
    for key in QUANTISATION_KEYS:
        config.pop(key, None)
    return config
