"""Training state: kept aside, served to peers, and healed from them."""

from elasticgang.state.keeper import Keeper

__all__ = ["Keeper"]
