"""A whole job in one thread: random schedules and scenarios over the real rules."""
