package volume

import (
	"maps"
	"os"
	"slices"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"
)

// chartParameters are what the Helm chart refuses before the driver would.
type chartParameters struct {
	Parameters     []string
	DiskType       []DiskType
	BlockSize      []int
	LocalBlockSize int
	Placement      []Placement
	Filesystems    []string
	MkfsOptions    map[string]struct {
		Filesystems []string
		Valid       string
		Range       []int
		Values      []string
		Pattern     string
	}
}

func TestTheChartKnowsTheParametersOfTheDriver(t *testing.T) {
	text, err := os.ReadFile("../../deploy/chart/parameters.yaml")
	must(t, err)
	var chart chartParameters
	must(t, yaml.UnmarshalStrict(text, &chart))
	for what, pair := range map[string][2]any{
		"parameters":       {parameterNames, chart.Parameters},
		"disk types":       {[]DiskType{diskTypeDistributed, DiskTypeLocal}, chart.DiskType},
		"block sizes":      {BlockSizes, chart.BlockSize},
		"local block size": {localBlockSize, chart.LocalBlockSize},
		"placements":       {placements, chart.Placement},
		"filesystems":      {Filesystems, chart.Filesystems},
		"mkfs options": {slices.Sorted(maps.Keys(mkfsRules)),
			slices.Sorted(maps.Keys(chart.MkfsOptions))},
	} {
		if diff := cmp.Diff(pair[0], pair[1]); diff != "" {
			t.Errorf("%s differ (-driver +chart):\n%s", what, diff)
		}
	}
	for name, option := range chart.MkfsOptions {
		rule := mkfsRules[name]
		if diff := cmp.Diff(slices.Sorted(maps.Keys(rule.args)), option.Filesystems); diff != "" {
			t.Errorf("the filesystems of %s differ (-driver +chart):\n%s", name, diff)
		}
		if rule.valid != option.Valid {
			t.Errorf("%s is %q in the driver and %q in the chart", name, rule.valid, option.Valid)
		}
		if option.Pattern != "" {
			if option.Pattern != mkfsLabel.String() {
				t.Errorf("%s matches %s in the driver and %s in the chart", name, mkfsLabel, option.Pattern)
			}
			continue
		}
		for _, value := range mkfsValues(option.Range) {
			accepted := slices.Contains(option.Values, value)
			if n, err := strconv.Atoi(value); len(option.Range) == 2 && err == nil {
				accepted = n >= option.Range[0] && n <= option.Range[1]
			}
			if rule.check != nil && rule.check(value) != accepted {
				t.Errorf("%s=%s: the driver accepts it %v, the chart %v", name, value, !accepted, accepted)
			}
		}
	}
}

// mkfsValues are values of any option, and those at the ends of a range.
func mkfsValues(ends []int) []string {
	values := []string{"", "true", "false", "yes"}
	for n := range 20 {
		values = append(values, strconv.Itoa(1<<n), strconv.Itoa(n))
	}
	for _, end := range ends {
		values = append(values, strconv.Itoa(end-1), strconv.Itoa(end), strconv.Itoa(end+1))
	}
	return values
}
