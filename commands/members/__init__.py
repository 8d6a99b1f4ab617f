"""Members of a federation: their keys, the roster, invitations, and how they join."""
