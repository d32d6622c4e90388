"""The draft tree: built from the drafter's candidates, accepted along one path."""

from ddtree.tree.build import Tree, build_tree, chain_tree
from ddtree.tree.verify import Path, accept

__all__ = ["Path", "Tree", "accept", "build_tree", "chain_tree"]
