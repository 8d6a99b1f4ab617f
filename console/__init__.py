"""A web page next to a daemon: what runs here, what left, who is missing; read from its folder."""
