"""Processes of one host and what they share: the fork server, status pages, the lease, message framing."""
