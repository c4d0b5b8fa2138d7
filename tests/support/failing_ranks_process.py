"""An engine process whose ranks fail when they are told to; see `failing_rank`."""

from paged.ranks import local_rank
from paged.server import engine_process

if __name__ == "__main__":
    local_rank.RANK_PROCESS = "tests.support.failing_rank"
    engine_process.main()
