"""One job at the coordinator, and the two ways in which its rounds are collected."""
