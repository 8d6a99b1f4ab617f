"""Federations on one machine (`staddle demo`) and calls to a coordinator as its operator."""
