"""Numbers: rounding modes, their bit algebra, random bits, and the kernel over them."""
