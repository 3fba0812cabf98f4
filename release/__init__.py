"""Checks before a release: `make release-check`.

__main__        runs all checks and writes the support matrix
distribution    builds the sdist and wheel, and checks their contents and metadata
environments    clean environments, one per Python on this machine
smoke           what each environment runs, with the installed wheel only
compatibility   client and servers of different Python versions
support         docs/support.md
"""
