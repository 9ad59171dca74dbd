"""The hook: ``custom_hooks = [dict(type='HFCheckpointHook')]``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmengine.hooks import CheckpointHook, Hook
from mmengine.registry import HOOKS

from xhf_hooks.collective import Collective
from xhf_hooks.commit.staging import VERIFY_LEVELS, CheckpointFolder
from xhf_hooks.errors import OptionError, XhfError
from xhf_hooks.exporters.llava import LLAVA_FORMATS
from xhf_hooks.exporters.lora import LORA_MODES
from xhf_hooks.exporters.reward import has_head
from xhf_hooks.hooks import options, preflight
from xhf_hooks.hooks.best_metric import BestMetric
from xhf_hooks.hooks.exit_wait import ExitWait
from xhf_hooks.hooks.report import ProgressLog, log_preparations, report_save
from xhf_hooks.hooks.schedule import Schedule
from xhf_hooks.hooks.tokenizer import find_tokenizer, with_chat_template
from xhf_hooks.records import CommittedCheckpoint, Step
from xhf_hooks.registry import WRITERS
from xhf_hooks.save import SaveOptions, Saver


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
        by_epoch (bool, optional): What ``interval`` counts. Defaults to None: as the CheckpointHook does,
            else epochs.
        save_begin (int): Epoch or iteration at which saving begins. Defaults to 0.
        save_last (bool): Save when training ends, regardless of ``interval``. Defaults to True.
        save_best (str, List[str], optional): As in CheckpointHook; writes ``hf_model_best``
            (``hf_model_best_<metric>`` for several). Defaults to None.
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
            is being written. Defaults to 600.
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
        options.check_schedule(interval, by_epoch, save_begin, save_last, save_best)
        if rule is not None and save_best is None:
            raise OptionError('rule', 'None when save_best is None', rule)
        self.out_dir = options.parse_out_dir(out_dir)
        self.save_last = save_last
        self._interval, self._by_epoch, self._save_begin = interval, by_epoch, save_begin
        self._best = None if save_best is None else BestMetric(save_best, rule)
        self._max_keep = options.check_max_keep(max_keep_ckpts)
        self._tokenizer = options.check_tokenizer(tokenizer)
        self._chat_template = options.check_switch('chat_template', chat_template)
        self._on_error = options.check_choice('on_error', on_error, ('continue', 'raise'))
        self._save_options = dict(
            module=options.check_module(module),
            dtype=options.parse_dtype(dtype),
            lora=options.check_choice('lora', lora, (None, *LORA_MODES)),
            llava_format=options.check_choice('llava_format', llava_format, (None, *LLAVA_FORMATS)),
            max_shard_nbytes=options.parse_nbytes('max_shard_size', max_shard_size),
            bucket_nbytes=options.parse_nbytes('bucket_size', bucket_size),
            in_background=options.check_switch('async_save', async_save),
            verify=options.check_choice('verify', verify, VERIFY_LEVELS),
        )
        self._writer = options.check_choice('writer', writer, ('auto', *WRITERS.module_dict))
        self._async = async_save
        self._async_busy = options.check_choice('async_busy', async_busy, ('wait', 'skip'))
        if async_busy != 'wait' and not async_save:
            raise OptionError('async_busy', "'wait' when async_save is False", async_busy)
        self._exit_wait_secs = options.check_seconds('exit_wait_secs', exit_wait_secs)
        self._saver: Saver | None = None  # there is one while training goes on
        self._saved_at: int | None = None
        self._best_in_flight: tuple[str, float] | None = None

    def before_train(self, runner: Any) -> None:
        """Prove that the save will work. Runs on: all ranks.

        Raises:
            XhfError: It will not; the same on every rank, before any training is paid for.
        """
        model, facts = preflight.unwrap(runner.model)
        if self._save_options['dtype'] == 'F32':
            preflight.refuse_unreadable_masters(runner.model)
        self._schedule = self._resolve_schedule(runner)
        self._collective = Collective()
        final = Path(self.out_dir or Path(runner.log_dir) / 'hf_model').absolute()
        writer = preflight.choose_writer(runner, self._writer, final.parent, self._collective)
        token_id = runner.cfg.get('reward_token_id') if has_head(model) else None
        save_options = SaveOptions(writer=writer, facts=facts, reward_token_id=token_id, **self._save_options)
        self._saver = Saver(model, save_options, self._collective)
        plan = self._saver.prepare()
        self._newest = CheckpointFolder(final, self._max_keep)
        suffixes = [] if self._best is None else self._best.folder_suffixes()
        self._best_folders = {
            suffix: CheckpointFolder(final.with_name(f'{final.name}_{suffix}'), max_keep=1) for suffix in suffixes
        }
        with self._collective.stage('preflight'):
            if self._collective.rank == 0:
                folders = [self._newest, *self._best_folders.values()]
                base_dir, sweep = self._saver.exporter.base_dir, self.out_dir is None
                preflight.claim_targets(runner, folders, plan.nbytes, base_dir, sweep=sweep)
                self._saver.set_tokenizer(*self._final_tokenizer(runner))
                for warning in self._saver.rehearse(self._newest):
                    runner.logger.warning(f'HFCheckpointHook: {warning}')
        if self._async:
            with self._collective.stage('preflight'):
                reserved = self._saver.reserve_snapshot()
            runner.logger.info(
                f'HFCheckpointHook: saves go on in the background, from {reserved / 1e6:.0f} MB of host memory on '
                f'this rank'
            )
            self._exit_wait = ExitWait(lambda: self._wait_at_exit(runner))
        log_preparations(runner, self._saver, self._schedule, writer, final)

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        done = runner.iter + 1
        if self._saver.background.succeeded:
            self._collect(runner)
        if self._schedule.is_due_after_iter(done):
            self._save(runner, Step('iter', done, done), self._newest)

    def after_train_epoch(self, runner: Any) -> None:
        done = runner.epoch + 1
        if self._schedule.is_due_after_epoch(done):
            self._save(runner, Step('epoch', done, runner.iter), self._newest)

    def after_val_epoch(self, runner: Any, metrics: dict[str, float] | None = None) -> None:
        if self._best is None or not metrics or self._saver is None:
            return
        if self._best_in_flight is not None:  # whether it was saved decides what the best is
            self._collect(runner)
        try:
            improved = self._best.improved(metrics, runner.message_hub)
        except XhfError as error:
            self._handle(runner, error, 'finding the best save')
            return
        for metric, score in improved.items():
            folder = self._best_folders[self._best.folder_suffix(metric)]
            self._save(runner, Step('iter', runner.iter, runner.iter), folder, best=(metric, score))

    def after_train(self, runner: Any) -> None:
        self._collect(runner)
        if self.save_last and self._saved_at != runner.iter:
            unit, number = ('epoch', runner.epoch) if self._schedule.by_epoch else ('iter', runner.iter)
            self._save(runner, Step(unit, number, runner.iter), self._newest)
            self._collect(runner)
        if self._collective.rank == 0:
            for folder in (self._newest, *self._best_folders.values()):
                folder.release()
        if self._async:
            self._exit_wait.close()
        self._saver.close()
        self._saver = None
        self._collective.close()

    def _save(self, runner: Any, step: Step, folder: CheckpointFolder, best: tuple[str, float] | None = None) -> None:
        """One save, of a metric's best score if ``best`` says so. Runs on: all ranks."""
        if self._async and not self._make_way(
            runner, step, may_skip=best is None and step.iteration < runner.max_iters
        ):
            return
        committed, progress = None, ProgressLog(runner.logger, step.label)
        try:
            if self._async:
                self._saver.start(folder, step, progress)
            else:
                committed = self._saver.save(folder, step, progress)
        except XhfError as error:
            self._handle(runner, error, f'the save of {step.label}')
            return
        if folder is self._newest:
            self._saved_at = step.iteration
        self._best_in_flight = best
        if committed is not None:
            self._report(runner, committed)

    def _make_way(self, runner: Any, step: Step, *, may_skip: bool) -> bool:
        """End the save that is in flight; False when this one is to be skipped instead."""
        background = self._saver.background
        ranks_agree_on_it = self._async_busy == 'skip' and may_skip
        if ranks_agree_on_it and any(self._collective.all_gather(background.busy and not background.done)):
            runner.logger.warning(
                f'HFCheckpointHook: skipped the save of {step.label}: the one before is still being written'
            )
            return False
        self._collect(runner)
        return True

    def _collect(self, runner: Any) -> None:
        """Wait for the save in flight, if any, and report it. All ranks get the same outcome."""
        if not self._saver.background.busy:
            return
        try:
            committed = self._saver.background.outcome()
        except XhfError as error:
            self._best_in_flight, self._saved_at = None, None
            self._handle(runner, error, 'the save in the background')
        else:
            self._report(runner, committed)

    def _wait_at_exit(self, runner: Any) -> None:
        background = self._saver.background
        if background.busy and not background.done:
            runner.logger.warning('HFCheckpointHook: the process ends, but a save is being written: waiting for it')
            if not background.wait(self._exit_wait_secs):
                runner.logger.error(
                    f'HFCheckpointHook: it was not written within exit_wait_secs={self._exit_wait_secs} s. The '
                    f'previous save is untouched.'
                )

    def _handle(self, runner: Any, error: XhfError, what: str) -> None:
        """An error that all ranks have: end the run or go on, as ``on_error`` says."""
        if self._on_error == 'raise':
            raise error
        runner.logger.error(
            f'HFCheckpointHook: {what} failed and training goes on: {error}. The previous save is untouched.'
        )

    def _report(self, runner: Any, committed: CommittedCheckpoint) -> None:
        if self._best_in_flight is not None:
            metric, score = self._best_in_flight
            self._best_in_flight = None
            self._best.remember(metric, score, runner.message_hub)
            runner.logger.info(f'HFCheckpointHook: best {metric} so far, {score:.4f}')
        report_save(runner, committed, to_visualizer=self._collective.rank == 0)

    def _final_tokenizer(self, runner: Any) -> tuple[Any | None, list[int]]:
        """With the ids of what ends an answer. Runs on: rank 0."""
        tokenizer = find_tokenizer(runner, self._tokenizer, self._saver.exporter)
        return with_chat_template(runner, tokenizer) if self._chat_template else (tokenizer, [])

    def _resolve_schedule(self, runner: Any) -> Schedule:
        own = next((hook for hook in runner.hooks if isinstance(hook, CheckpointHook)), None)
        if self._interval is None and own is not None:
            return Schedule(own.interval, own.by_epoch, self._save_begin or own.save_begin)
        by_epoch = self._by_epoch
        if by_epoch is None:
            by_epoch = True if own is None else own.by_epoch
        return Schedule(-1 if self._interval is None else self._interval, by_epoch, self._save_begin)
