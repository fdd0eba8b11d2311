"""A module whose import does not end: for a fork server whose owner dies meanwhile."""

import time

time.sleep(600)
