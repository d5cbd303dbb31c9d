"""How the processes of a run find each other; everything else is the mesh's."""

import jax


def connect(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> None:
    """Connects to the other processes of a run; to be called before JAX is used.

    With no argument at all the cluster tells: JAX knows Slurm, Kubernetes, Open MPI,
    and pods of TPUs (`jax.distributed.initialize`).

    Args:
      coordinator: "HOST:PORT" of the process with number 0.
      num_processes: of the run.
      process_id: of this process, from 0.

    Raises:
      ValueError: some are given and some are not, a number out of its range, or no
        cluster is found.
      OSError: the others cannot be reached.
    """
    given = (coordinator, num_processes, process_id)
    if any(value is None for value in given) != all(value is None for value in given):
        raise ValueError(
            "--coordinator, --num_processes and --process_id must be given together, "
            f"got {', '.join(map(str, given))}. Give all, or --distributed alone."
        )
    if process_id is not None and not 0 <= process_id < (num_processes or 0):
        raise ValueError(
            "`process_id` must be from 0 to `num_processes` - 1, got "
            f"{process_id} of {num_processes}. Number the processes from 0."
        )
    try:
        jax.distributed.initialize(coordinator, num_processes, process_id)
    except ValueError as error:
        raise ValueError(
            "--distributed must find a cluster that JAX knows (Slurm, Kubernetes, Open "
            f"MPI, a pod of TPUs), got: {error} Give --coordinator, --num_processes "
            "and --process_id."
        ) from error
    except RuntimeError as error:
        raise OSError(
            f"the process at --coordinator={coordinator} must answer, got: {error} "
            "Start all processes, with the same address and port."
        ) from error
