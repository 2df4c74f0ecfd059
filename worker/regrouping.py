"""How a worker goes on after one of its other hosts was lost: its first host's process becomes the same service again,
with the ranks that it has, and waits for the other hosts to join. Those keep their ranks as well (worker.hosts).
"""

from mesh.domain.workers import WorkerRole
from mesh.launch import Program
from mesh.rpc.server import MeshServer
from worker.config import WorkerConfig
from worker.handover import Handover, KeptRanks
from worker.role_change import MODULES, ports_of, settings_of


def program_again(
    config: WorkerConfig, role: WorkerRole, kept: KeptRanks, server: MeshServer, drained_at: float
) -> Program:
    """The program that this process is to become. config: as the service was started with; drained_at: when its last
    request had ended, on the monotonic clock.
    """
    settings = [*settings_of(config, type(config).model_fields), *ports_of(server)]
    # A worker on several hosts has no other role to which it could return.
    return Program(MODULES[role], settings, Handover(kept, [], drained_at).leave())
