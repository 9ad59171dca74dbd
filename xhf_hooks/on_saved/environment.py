"""The environment of a command that a rank starts: the rank's own, without the variables that make it a rank."""

from __future__ import annotations

from collections.abc import Mapping

#: Variables that torchrun, deepspeed, accelerate, MPI and SLURM's srun set for a rank. A program that finds them would
#: act as a rank and wait for the others.
_OF_A_RANK = {
    *('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'GROUP_WORLD_SIZE', 'NODE_RANK'),
    *('ROLE_RANK', 'ROLE_WORLD_SIZE', 'ROLE_NAME', 'CROSS_RANK', 'CROSS_SIZE', 'LOCAL_SIZE', 'MASTER_ADDR'),
    *('MASTER_PORT', 'TORCH_NCCL_ASYNC_ERROR_HANDLING', 'NCCL_ASYNC_ERROR_HANDLING', 'SLURM_PROCID'),
    *('SLURM_LOCALID', 'SLURM_NODEID', 'SLURM_NTASKS', 'SLURM_NPROCS', 'SLURM_STEP_NUM_TASKS'),
}
_PREFIXES_OF_A_RANK = ('TORCHELASTIC_', 'ACCELERATE_', 'FSDP_', 'OMPI_', 'PMI_', 'PMIX_', 'MV2_COMM_', 'PALS_')


def without_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without these variables. Those that the user sets stay, such as CUDA_VISIBLE_DEVICES."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _OF_A_RANK and not name.startswith(_PREFIXES_OF_A_RANK)
    }
