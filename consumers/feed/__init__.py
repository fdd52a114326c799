"""What every trainer needs between a bridge and its steps: `Feed`, and what its adapters share.

Knows no trainer, and needs numpy only.
"""

from shmbridge.consumers.feed.earlier_run import BridgeAhead as BridgeAhead
from shmbridge.consumers.feed.earlier_run import HeldRecords as HeldRecords
from shmbridge.consumers.feed.earlier_run import Start as Start
from shmbridge.consumers.feed.earlier_run import bridge_info as bridge_info
from shmbridge.consumers.feed.earlier_run import load_published as load_published
from shmbridge.consumers.feed.earlier_run import require_start as require_start
from shmbridge.consumers.feed.earlier_run import save_published as save_published
from shmbridge.consumers.feed.earlier_run import trained_as as trained_as
from shmbridge.consumers.feed.feed import STATE as STATE
from shmbridge.consumers.feed.feed import Drained as Drained
from shmbridge.consumers.feed.feed import Feed as Feed
from shmbridge.consumers.feed.feed import Step as Step
from shmbridge.consumers.feed.feed import blames_groups as blames_groups
from shmbridge.consumers.feed.feed import lacks_memory as lacks_memory
from shmbridge.consumers.feed.feed import lost_peer as lost_peer
from shmbridge.consumers.feed.settings import Refused as Refused
from shmbridge.consumers.feed.settings import ReleaseAt as ReleaseAt
from shmbridge.consumers.feed.settings import Unfit as Unfit
from shmbridge.consumers.feed.settings import check_words as check_words
from shmbridge.consumers.feed.settings import refuse as refuse
from shmbridge.consumers.feed.settings import setting as setting
from shmbridge.consumers.feed.settings import warn_if_untested as warn_if_untested
from shmbridge.consumers.feed.settings import warn_of_stale_rows as warn_of_stale_rows
