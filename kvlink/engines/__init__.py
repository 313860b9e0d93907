"""Adapters that give kvlink's blocks to the engines that compute with them.

Nothing here is imported by ``import kvlink``; an adapter imports its engine when it is imported.
"""
