"""fp8core under the names of other libraries, only where a program asks for it."""
