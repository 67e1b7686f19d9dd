"""fp8core's own backends, each a plug-in like any third party's."""
