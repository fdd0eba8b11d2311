"""Authenticated sessions between agents and coordinators: frames, handshake, messages, and the asyncio rim."""
