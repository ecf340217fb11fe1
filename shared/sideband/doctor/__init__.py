"""Is a filesystem fit to be a payload root? Measured from one host or, better, from two.

Two sides meet in a folder below the root: the one that made it leads, the other follows. All
that they say goes through files of that folder, so what is measured is what ranks will see.
``findings.py`` turns numbers into words and is pure; ``meeting.py`` and ``probes.py`` act.

Errors: DoctorError, with the leaves FolderUnusable, PeerSilent and MeetingTaken.
"""
