"""The optimizer inside of the backward pass: no whole gradient of a stack exists."""
