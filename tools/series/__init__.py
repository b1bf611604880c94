# SPDX-License-Identifier: Apache-2.0
"""The series engine: puts our ordered patches onto a vLLM that upstream released.

Data flows one way: ``manifest`` says what each patch owns, ``base`` reads upstream's
files, ``graft``, ``edits``, ``imports`` and ``cmake`` turn one text into another,
``series`` runs the patches in order, and ``wheel``, ``checkout`` and ``diff`` write
the result down. Nothing here imports or runs the base.
"""
