# SPDX-License-Identifier: Apache-2.0
"""What pip calls to learn the version of a source archive, in place of setuptools.

pip asks the archive's build system before it saves the archive. Upstream's would need
torch and run upstream's ``setup.py``; the archive's ``PKG-INFO`` says the same.
"""
