"""Print how long tests, rows and tiers took: the last step of tools/test.sh, `python tools/test_times.py FOLDER`.

FOLDER has pytest's report of each row, ROW.xml, and the file `tier` with the line `TIER SECONDS`.
"""

import sys
from pathlib import Path
from xml.etree import ElementTree

SLOWEST = 40


def main(folder: Path) -> None:
    tests, rows = [], []
    for report in sorted(folder.glob('*.xml')):
        (suite,) = ElementTree.parse(report).getroot().iter('testsuite')
        rows.append((float(suite.get('time')), int(suite.get('tests')), report.stem))
        tests += [(float(test.get('time')), test.get('file'), test.get('name')) for test in suite.iter('testcase')]
    print(f'== the slowest {SLOWEST} of {len(tests)} tests')
    for secs, file, name in sorted(tests, reverse=True)[:SLOWEST]:
        print(f'{secs:7.1f} s  {file}::{name}')
    print('== rows, which go on at the same time, and the tier')
    for secs, n_tests, row in rows:
        print(f'{secs:7.1f} s  {n_tests:5} tests  {row}')
    name, secs = (folder / 'tier').read_text().split()
    print(f'{float(secs):7.1f} s               {name}')


if __name__ == '__main__':
    main(Path(sys.argv[1]))
