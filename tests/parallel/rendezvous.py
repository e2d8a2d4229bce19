"""Where the ranks of a test's job meet: a store that the test process holds open until they have."""

from torch.distributed import TCPStore

ENVIRONMENT = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
"""Makes ranks join a store that is open already, at MASTER_PORT."""


def open_store() -> TCPStore:
    """A store on a free port. It is open at once: a port that was only picked could be taken by then."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
