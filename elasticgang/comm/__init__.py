"""Process groups that live in a subprocess, reconfigure in place and are aborted by a kill."""
