"""What a round may do: draft nothing, a chain, or a tree. Pure."""

from typing import NamedTuple

# Chains and trees of other sizes are worth little more than the nearest of these, and each size has to be tried.
CHAIN_SIZES = (1, 2, 4, 8, 16, 32, 64)
TREE_SIZES = (16, 32, 64)
# To a batch each node costs as many tokens to read as it has items, so that small trees pay where chains of as many do.
SMALL_TREE = 8
# Nodes that a tree may have where nobody says how many.
MOST_NODES = 32
# The same of a compiled tree, which is read whole.
COMPILED_NODES = 16


class Plan(NamedTuple):
    """What a round drafts and verifies.

    Attributes:
        depth: tokens to draft; 0 drafts nothing.
        budget: nodes of the tree that is made of them; 0 makes a chain.
    """

    depth: int
    budget: int = 0

    @property
    def num_nodes(self) -> int:
        """Drafted tokens that the target reads, at most."""
        return self.budget or self.depth

    def includes(self, other: "Plan") -> bool:
        """Whether a round of this plan does all that one of the other does, or more."""
        is_as_deep = self.depth >= other.depth and self.num_nodes >= other.num_nodes
        return is_as_deep and (self.budget > 0 or other.budget == 0)

    def within(self, room: int) -> "Plan":
        """The plan where no more than `room` tokens are worth drafting."""
        return self if self.depth <= room else Plan(room, self.budget if room else 0)


NOTHING = Plan(0)


def compiled_plans(depth: int, budget: int) -> list[Plan]:
    """The plans that compiled rounds choose from, see [`all_plans`]: few, since each takes its time to compile."""
    sizes = sorted({(depth + 1) // 2, depth} - {0})
    return [NOTHING, *map(Plan, sizes), *([Plan(depth, budget)] if budget else [])]


def all_plans(depth: int, budget: int, batch: int = 1) -> list[Plan]:
    """The plans that a call chooses from.

    Args:
        depth: the most tokens to draft.
        budget: the most nodes of a tree; 0 for chains only.
        batch: items that it begins with.
    """
    chains = [Plan(size) for size in CHAIN_SIZES if size < depth] + [Plan(depth)]
    wanted = TREE_SIZES if batch == 1 else (SMALL_TREE, *TREE_SIZES)
    sizes = [size for size in wanted if size < budget] + ([budget] if budget else [])
    return [NOTHING, *chains, *(Plan(depth, size) for size in sizes)]
