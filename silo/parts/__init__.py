"""The parts that a silo shares in a round: declared, computed, encoded."""
