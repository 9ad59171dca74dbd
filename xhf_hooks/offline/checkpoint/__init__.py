"""Reads checkpoints on disk in place: DeepSpeed folders, ``.pth`` files, FSDP, torch.distributed.checkpoint.

    source = CheckpointSource.open('work_dirs/run')    finds the checkpoint by file names, parses the pickles safely,
                                                       and checks the size of every file
    source.specs()                                     as for any source
    source.tensors['llm.lm_head.weight'].read_into(0, out)

Executes nothing from a checkpoint (:mod:`.unpickler`) and does not import DeepSpeed.
"""
