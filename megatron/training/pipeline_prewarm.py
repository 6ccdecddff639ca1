"""The flags of pipeline prewarm, and its place in the training loop.

``startup`` surrounds ``train()``, ``first_iteration`` every ``train_step()``; both do nothing unless a flag asks.
"""

import contextlib
import datetime
import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, Iterator

from megatron.training import global_vars
from megatron.training.utils import print_rank_0

_startup: "_Startup | None" = None


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the group of flags of pipeline prewarm."""
    from megatron.core.pipeline_parallel.parallel_prewarm import SKIPPABLE

    group = parser.add_argument_group(title="pipeline prewarm")
    group.add_argument(
        "--pipeline-prewarm",
        action="store_true",
        help="Before the first iteration, compile what all pipeline stages need at the same time, by one "
        "synthetic forward and backward of every model chunk; training stays bit for bit the same.",
    )
    group.add_argument(
        "--pipeline-prewarm-report",
        metavar="PATH",
        help="Write what every rank did from the start of training to the end of its first iteration, as "
        "JSON for tools/plot_startup.py; also without --pipeline-prewarm, to compare.",
    )
    group.add_argument(
        "--pipeline-prewarm-skip",
        nargs="+",
        default=[],
        choices=SKIPPABLE,
        metavar="STEP",
        help=f"Steps of --pipeline-prewarm to leave out, of: {', '.join(SKIPPABLE)}.",
    )


def validate(args: Namespace) -> None:
    """Raises ValueError for flags of pipeline prewarm that cannot have an effect."""
    if args.pipeline_prewarm_skip and not args.pipeline_prewarm:
        raise ValueError(
            f"--pipeline-prewarm-skip {' '.join(args.pipeline_prewarm_skip)} without --pipeline-prewarm: "
            "expected both. Add --pipeline-prewarm, or drop the steps to skip."
        )
    path = args.pipeline_prewarm_report
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise ValueError(
            f"--pipeline-prewarm-report {path}: its folder does not exist. Make it before the run."
        )


class _Startup:
    """One call of ``train()``: what this rank did until the end of its first iteration."""

    def __init__(self, args: Namespace):
        from megatron.core import mpu
        from megatron.core.pipeline_parallel.startup_timeline import Timeline

        self.args = args
        self.timeout = datetime.timedelta(minutes=args.distributed_timeout_minutes)
        self.timeline = Timeline(args.rank, mpu.get_pipeline_model_parallel_rank())
        self.prewarmed = False

    def prewarm(self, model: list, config: Any, unsupported: str | None) -> None:
        """Runs prewarm, and prints its table on rank 0."""
        from megatron.core.num_microbatches_calculator import get_num_microbatches
        from megatron.core.pipeline_parallel.parallel_prewarm import prewarm
        from megatron.core.pipeline_parallel.prewarm_inputs import Packing

        args = self.args
        packed = args.dataloader_inter_document_masking or args.sft
        evaluates = getattr(args, "do_valid", False) or getattr(args, "do_test", False)
        done = prewarm(
            model,
            config,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            num_microbatches=get_num_microbatches(),
            packing=Packing() if packed else None,
            attention_mask=args.create_attention_mask_in_dataloader,
            evaluation_micro_batch_size=args.eval_micro_batch_size if evaluates else None,
            skip=args.pipeline_prewarm_skip,
            unsupported=unsupported,
            timeout=self.timeout,
            timeline=self.timeline,
            progress=lambda text: print_rank_0(f"> pipeline prewarm: {text}"),
        )
        self.prewarmed = done is not None
        if self.prewarmed and (report := self._gather()):
            print_rank_0(report.prewarm_table())

    @contextlib.contextmanager
    def iteration(self) -> Iterator[None]:
        """The first ``train_step``; afterwards rank 0 says what it still compiled."""
        from megatron.core.pipeline_parallel import exchange_waits

        watched = self.timeline.watch_compilations()
        span = self.timeline.span("iteration 1", phase="iteration", synchronize=True)
        with watched, span, exchange_waits.recorded(self.timeline):
            yield
        report = self._gather()
        if report is None:
            return
        if self.prewarmed:
            left = report.leftovers()
            print_rank_0(
                "\n".join(["> iteration 1 still compiled:", *left])
                if left
                else "> iteration 1 compiled nothing that pipeline prewarm can see"
            )
        if self.args.pipeline_prewarm_report is not None:
            report.write(self.args.pipeline_prewarm_report)
            print_rank_0(f"> start-up of every rank: {self.args.pipeline_prewarm_report}")

    def _gather(self):
        """All ranks' timelines, on rank 0."""
        from megatron.core.pipeline_parallel.prewarm_rendezvous import Rendezvous
        from megatron.core.pipeline_parallel.startup_timeline import StartupReport, Timeline

        rendezvous = Rendezvous(stage=self.timeline.stage, timeout=self.timeout)
        texts = rendezvous.gather(json.dumps(self.timeline.to_dict()))
        if texts is None:
            return None
        timelines = [Timeline.from_dict(json.loads(text)) for text in texts]
        return StartupReport(self.prewarmed, timelines)


@contextlib.contextmanager
def startup(model: list, optimizer: Any, config: Any, pg_collection: Any = None) -> Iterator[None]:
    """Surrounds ``train()``: prewarms, and watches the first iteration, where the flags ask for it."""
    global _startup
    args = global_vars.get_args()
    asked = getattr(args, "pipeline_prewarm", False)  # a YAML configuration may lack it
    watched = asked or getattr(args, "pipeline_prewarm_report", None) is not None
    trains = optimizer is not None and not args.skip_train and args.iteration < args.train_iters
    if not (watched and trains):
        yield
        return
    _startup = _Startup(args)
    try:
        if asked:
            _startup.prewarm(model, config, _unsupported(args, pg_collection))
        yield
    finally:
        _startup = None


@contextlib.contextmanager
def first_iteration() -> Iterator[None]:
    """Surrounds ``train_step()``: the first one after ``startup`` is watched."""
    global _startup
    watching, _startup = _startup, None
    if watching is None:
        yield
        return
    with watching.iteration():
        yield


def _unsupported(args: Namespace, pg_collection: Any) -> str | None:
    from megatron.core.process_groups_config import MultiModuleProcessGroupCollection

    if isinstance(pg_collection, MultiModuleProcessGroupCollection):
        return "several modules, each with process groups of its own, are trained"
    for name in (
        "use_megatron_fsdp",
        "use_torch_fsdp2",
        "modelopt_enabled",
        "logits_save_dir",
        "logits_load_dir",
    ):
        if value := getattr(args, name, None):
            return f"{name}={value!r} is not supported"
    return None
