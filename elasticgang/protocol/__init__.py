"""The pure rules: records, recovery, and the state machines of members and agents. No clock, no socket."""
