"""Print how long tests, rows and tiers took: the last step of tools/test.sh, `python tools/test_times.py FOLDER`.

FOLDER has pytest's report of each row, ROW.xml, and a line `TIER SECONDS` for each tier in the file `tiers`.
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
    print('== rows, which go on at the same time, and tiers')
    for secs, n_tests, row in rows:
        print(f'{secs:7.1f} s  {n_tests:5} tests  {row}')
    for name, secs in map(str.split, (folder / 'tiers').read_text().splitlines()):
        print(f'{float(secs):7.1f} s               {name}')


if __name__ == '__main__':
    main(Path(sys.argv[1]))
