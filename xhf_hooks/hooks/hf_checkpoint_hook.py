"""The hook: ``custom_hooks = [dict(type='HFCheckpointHook')]``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from mmengine.hooks import Hook
from mmengine.registry import HOOKS, MODEL_WRAPPERS

from xhf_hooks import config
from xhf_hooks.errors import OptionError, XhfError
from xhf_hooks.exporters.xtuner.reward import has_head
from xhf_hooks.hooks.averaged_weights import choose_weights
from xhf_hooks.hooks.best_folders import find_best_folders
from xhf_hooks.hooks.best_metric import BestMetric, earlier_folders
from xhf_hooks.hooks.tokenizer import with_chat_template
from xhf_hooks.hooks.train_loop import check_schedule, counts_epochs, resolve_schedule
from xhf_hooks.manager import RunSaves
from xhf_hooks.planning.types import CommittedCheckpoint, Step
from xhf_hooks.preflight import unwrap
from xhf_hooks.telemetry.log import RunLog, scalars


@HOOKS.register_module(force=True)  # takes the place of the package's function, which imports this
class HFCheckpointHook(Hook):
    """Save the model as a Hugging Face folder while it trains, at any DeepSpeed ZeRO stage.

    Before the first step it plans the whole save from metadata and raises what is wrong with it. A save
    that fails later is logged, and training goes on.

    Args:
        out_dir (str, Path, optional): Folder of the newest save. Defaults to None, which means
            ``work_dir/<timestamp>/hf_model``.
        interval (int, optional): Save every so many epochs or iterations; -1 means only at the end.
            Defaults to None, which means the schedule of the run's own CheckpointHook.
        by_epoch (bool, optional): Whether ``interval`` counts epochs. Defaults to None: it counts what the train
            loop counts, epochs in EpochBasedTrainLoop and iterations in IterBasedTrainLoop.
        save_begin (int): Epoch or iteration at which saving begins. Defaults to 0.
        save_last (bool): Save when training ends, regardless of ``interval``. Defaults to True.
        save_best (str, List[str], optional): As in CheckpointHook; writes ``hf_model_best``
            (``hf_model_best_<metric>`` for several). What is in that folder, and in those of the runs that a
            resumed checkpoint comes from, is only replaced or followed by a better one. Defaults to None.
        rule (str, List[str], optional): As in CheckpointHook. Defaults to None.
        max_keep_ckpts (int): How many saves to keep, the newest included; the older ones are named
            ``hf_model_iter_500``. -1 keeps all. Defaults to 1.
        module (str, optional): Dotted path of the PreTrainedModel in the trained model. Defaults to None:
            the model itself, ``llm``, or the only one there is.
        lora (str, optional): For a model with a LoRA adapter, 'adapter' (as peft saves it), 'merge' (a complete
            model with the adapter merged into its weights) or 'both' (the merged model, with the adapter in
            ``hf_model/adapter``). Defaults to None, which means 'adapter' where there is one, and for a reward
            model 'merge', unless its base model is quantized.
        llava_format (str, optional): For XTuner's LLaVAModel, 'xtuner' (its own layout, frozen parts left out),
            'xtuner_complete' (frozen parts, too) or 'huggingface' (transformers' LlavaForConditionalGeneration,
            complete, adapters merged). Defaults to None, which means 'xtuner'.
        tokenizer (object, dict, str, optional): A tokenizer, its MMEngine config, or its folder. Defaults to
            None: ``cfg.tokenizer``, else the base model's own files, else none, with a warning.
        chat_template (bool): When the run's config names an XTuner prompt template, give the saved tokenizer
            the chat template that writes dialogues as training had them, and generation_config its stop words.
            Defaults to True.
        ema (bool): Where the run has an EMAHook, save the weights that it averages, as CheckpointHook does and
            validation scores. False saves the live ones. Defaults to True.
        dtype (str, optional): 'float32' (the fp32 master weights where there are any), 'bfloat16' or
            'float16'. Defaults to None: as trained.
        max_shard_size (int, str): As in ``save_pretrained``. Defaults to '5GB'.
        bucket_size (int, str): How much is gathered at once; memory follows it. Defaults to '128MB'.
        writer (str): 'positional' (every rank writes its own slices; nothing is gathered), 'parallel' (every
            rank writes a part of what is gathered), 'stream' (rank 0 writes) or 'auto': 'positional' where all
            ranks see the folder, else 'stream'. The files are the same. Defaults to 'auto'.
        async_save (bool): Copy what is to be saved to host memory, which takes as many bytes on each rank as it
            writes, and write it while training goes on. Defaults to False.
        async_busy (str): 'wait' or 'skip' a save that is due while the one before is being written.
            Defaults to 'wait'.
        exit_wait_secs (float): How long the end of the process (an exception, SIGTERM) waits for a save that
            is being written. torchrun follows SIGTERM with SIGKILL after 30 s whatever is set here, unless it is
            started with ``--shutdown-timeout`` (torch 2.13 has it; older ones always kill after 30 s). Defaults to 600.
        verify (str): What is looked at before a save is committed: 'off', 'sizes' (file sizes and headers) or 'full'
            (every byte read back from the disk and compared with checksums taken from memory). Defaults to 'sizes'.
        on_error (str): 'continue' or 'raise', when a save fails. Defaults to 'continue'.

    Examples:
        >>> custom_imports = dict(imports=['xhf_hooks'])
        >>> custom_hooks = [dict(type='HFCheckpointHook')]
    """

    priority = 95  # after CheckpointHook (90)

    def __init__(
        self,
        out_dir: str | Path | None = None,
        *,
        interval: int | None = None,
        by_epoch: bool | None = None,
        save_begin: int = 0,
        save_last: bool = True,
        save_best: str | list[str] | None = None,
        rule: str | list[str] | None = None,
        max_keep_ckpts: int = 1,
        module: str | None = None,
        lora: str | None = None,
        llava_format: str | None = None,
        tokenizer: Any | None = None,
        chat_template: bool = True,
        ema: bool = True,
        dtype: str | None = None,
        max_shard_size: int | str = '5GB',
        bucket_size: int | str = '128MB',
        writer: str = 'auto',
        async_save: bool = False,
        async_busy: str = 'wait',
        exit_wait_secs: float = 600,
        verify: str = 'sizes',
        on_error: str = 'continue',
    ) -> None:
        config.check_schedule(interval, by_epoch, save_begin, save_last, save_best)
        if rule is not None and save_best is None:
            raise OptionError('rule', 'None when save_best is None', rule)
        self.out_dir = config.parse_out_dir(out_dir)
        self.save_last = save_last
        self._interval, self._by_epoch, self._save_begin = interval, by_epoch, save_begin
        self._best = None if save_best is None else BestMetric(save_best, rule)
        self._ema = config.check_switch('ema', ema)
        self._chat_template = config.check_switch('chat_template', chat_template)
        self._options = config.parse_run(
            max_keep_ckpts=max_keep_ckpts,
            module=module,
            lora=lora,
            llava_format=llava_format,
            tokenizer=tokenizer,
            dtype=dtype,
            max_shard_size=max_shard_size,
            bucket_size=bucket_size,
            writer=writer,
            async_save=async_save,
            async_busy=async_busy,
            exit_wait_secs=exit_wait_secs,
            verify=verify,
            on_error=on_error,
        )
        self._saves: RunSaves | None = None  # there is one while training goes on

    def before_train(self, runner: Any) -> None:
        """Prove that the save will work. Runs on: all ranks.

        Raises:
            XhfError: It will not; the same on every rank, before any training is paid for.
        """
        self.close()
        unwrapped = unwrap(runner.model, _wrappers())
        log = RunLog(runner.logger, 'HFCheckpointHook')
        self._schedule = resolve_schedule(runner, self._interval, self._by_epoch, self._save_begin)
        self._in_epochs = self._schedule.by_epoch and counts_epochs(runner)
        check_schedule(runner, self._schedule, log, saves_anyway=self.save_last or self._best is not None)
        unwrapped = choose_weights(unwrapped, runner.hooks, self, ema=self._ema, log=log)
        self._saves = RunSaves(
            unwrapped,
            Path(self.out_dir or Path(runner.log_dir) / 'hf_model').absolute(),
            self._options,
            log,
            run=runner,
            suffixes=[] if self._best is None else self._best.folder_suffixes(),
            reward_token_id=runner.cfg.get('reward_token_id') if has_head(unwrapped.model) else None,
            on_committed=partial(self._visualize, runner),
        )
        self._saves.prepare(
            runner.cfg.get('tokenizer'),
            when=self._schedule,
            sweep=Path(runner.work_dir) if self.out_dir is None else None,
            finish_tokenizer=(lambda found: with_chat_template(runner.cfg, found, log))
            if self._chat_template
            else None,
        )
        self._log = log
        if self._best is not None:
            self._learn_of_best(runner)

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        done = runner.iter + 1
        self._saves.collect_if_done()
        if self._schedule.is_due_after_iter(done):
            self._saves.save(Step('iter', done, done), may_skip=done < runner.max_iters)

    def after_train_epoch(self, runner: Any) -> None:
        done = runner.epoch + 1
        if self._schedule.is_due_after_epoch(done):
            self._saves.save(self._step(runner, done), may_skip=runner.iter < runner.max_iters)

    def after_val_epoch(self, runner: Any, metrics: dict[str, float] | None = None) -> None:
        if self._best is None or not metrics or self._saves is None:
            return
        if self._saves.must_tell_after:  # whether it was saved decides what the best is
            self._saves.collect()
        try:
            improved = self._best.improved(metrics, runner.message_hub)
        except XhfError as error:
            self._saves.handle(error, 'finding the best save')
            return
        for metric, score in improved.items():
            folder = self._saves.others[self._best.folder_suffix(metric)]
            remember = partial(self._remember, runner, metric, score)
            facts = self._best.facts(metric, score)
            self._saves.save(Step('iter', runner.iter, runner.iter), folder, after=remember, facts=facts)

    def after_train(self, runner: Any) -> None:
        try:
            self._saves.collect()
            if self.save_last and self._saves.saved_at != runner.iter:
                self._saves.save(self._step(runner, runner.epoch))
                self._saves.collect()
        finally:
            self.close()

    def close(self) -> None:
        """End what training that was interrupted (Ctrl-C in a notebook) has left: a save in flight is waited for, and
        others may use the folder. The next training in this process does it by itself. Runs on: any rank."""
        if self._saves is not None:
            self._saves.close()
            self._saves = None

    def _learn_of_best(self, runner: Any) -> None:
        """What is in the best folders counts, also where the resumed checkpoint is older. Runs on: all ranks."""
        collective, newest, hub = self._saves.collective, self._saves.newest.final, runner.message_hub
        try:
            with collective.stage('preflight'):
                finals = dict.fromkeys([*earlier_folders(hub), newest])
                found = find_best_folders(finals) if collective.rank == 0 else []
            for line in self._best.begin(newest, collective.broadcast(found), hub):
                self._log.info(line)
        except XhfError:
            self.close()
            raise

    def _remember(self, runner: Any, metric: str, score: float) -> None:
        """A save of the best score is committed."""
        self._best.remember(metric, score, runner.message_hub)
        self._log.info(f'best {metric} so far, {score:.4f}')

    def _visualize(self, runner: Any, committed: CommittedCheckpoint) -> None:
        if self._saves.collective.rank == 0:
            runner.visualizer.add_scalars(scalars(committed), step=committed.step.iteration)

    def _step(self, runner: Any, epochs: int) -> Step:
        """After an iteration or so many epochs, by what both schedule and train loop count."""
        return Step('epoch', epochs, runner.iter) if self._in_epochs else Step('iter', runner.iter, runner.iter)


def _wrappers() -> tuple[type, ...]:
    """What is registered as holding the model as ``module``, in MMEngine and its children's scopes."""
    found = list(MODEL_WRAPPERS.module_dict.values())
    for child in MODEL_WRAPPERS.children.values():
        found += child.module_dict.values()
    return tuple(found)
