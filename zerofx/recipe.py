"""Which passes run, in which order, for a configuration: the only statement of order."""

from __future__ import annotations

from zerofx.config import REDUCE_DTYPES, Config, ConfigError
from zerofx.manager import Pass, validate
from zerofx.passes.bucket_all_gathers import BucketAllGathers
from zerofx.passes.bucket_reductions import BucketReductions
from zerofx.passes.cast_gradients import CastGradients
from zerofx.passes.choose_layout import ChooseLayout
from zerofx.passes.delay_waits import DelayWaits
from zerofx.passes.fuse_optimizer import FuseOptimizer
from zerofx.passes.insert_all_gather import InsertAllGather
from zerofx.passes.insert_reduce_scatter import InsertReduceScatter
from zerofx.passes.keep_gathered import KeepGathered
from zerofx.passes.merge_reads import MergeReads
from zerofx.passes.prefetch_all_gathers import PrefetchAllGathers
from zerofx.passes.release_after_use import ReleaseAfterUse
from zerofx.passes.sink_casts import SinkCasts
from zerofx.passes.use_point_to_point import UsePointToPoint


def recipe(config: Config, backend: str = "gloo") -> tuple[Pass, ...]:
    """The default passes on a process group's backend.

    The program is cut into forward and backward between the logical and the physical passes.
    """
    size = config.bucket_bytes(backend)
    return (
        ChooseLayout(config.stage, config.persist_below),
        MergeReads(),
        SinkCasts(),
        *([ReleaseAfterUse()] if config.stage == 3 else []),
        *([KeepGathered()] if config.stage in (1, 2) else []),
        *([CastGradients(REDUCE_DTYPES[config.reduce_dtype])] if config.reduce_dtype else []),
        InsertAllGather(),
        BucketAllGathers(size),
        InsertReduceScatter(),
        BucketReductions(size),
        PrefetchAllGathers(config.prefetch),
        DelayWaits(),
        FuseOptimizer(),
        *([UsePointToPoint(size)] if "gloo" in backend else []),
    )


def passes_of(config: Config, backend: str) -> tuple[Pass, ...]:
    """What the user's `passes` make of the default ones.

    Raises ConfigError for what is no pass, and PassOrderError where they cannot run in that order.
    """
    order = recipe(config, backend)
    if config.passes is not None:
        order = _asked_for(config.passes(order))
    validate(order)
    return order


def _asked_for(made: object) -> tuple[Pass, ...]:
    if not isinstance(made, (tuple, list)):
        raise ConfigError(f"zerofx.compile(passes=...) returned {made!r}: return the tuple of passes to run")
    for each in made:
        if isinstance(each, type) or not hasattr(each, "level"):
            raise ConfigError(f"zerofx.compile(passes=...) returned {each!r}, which is no pass: make an instance")
    return tuple(made)
