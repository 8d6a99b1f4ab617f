"""What programs and notebooks use: experiments as objects, and their results."""
