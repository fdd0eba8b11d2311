"""A module that starts a thread when it is imported, as a fork server must not."""

import threading
import time

threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
