"""pytest-gpuserve: hardware compatibility regression tests for SGLang.

This module stays empty of imports: pytest loads it in every run of every project that has the plugin installed.
"""

__version__ = "0.1.0"
