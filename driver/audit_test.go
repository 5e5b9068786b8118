package driver

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
)

func TestAuditOptions(t *testing.T) {
	env := map[string]string{"OXIDE_HOST": "https://rack", "OXIDE_TOKEN": racktest.Token,
		"OXIDE_PROJECT": racktest.Project, "OXIDE_CLUSTER_ID": "blue"}
	parse := func(without string, args ...string) (AuditConfig, error) {
		return ParseAuditConfig(args, func(key string) string {
			if key == without {
				return ""
			}
			return env[key]
		}, &bytes.Buffer{})
	}
	deleting := []string{"--kubectl", "--delete", "--state-file=s"}
	for _, test := range []struct {
		name, without string
		args          []string
		want          string // a word of the error; empty: fine
	}{
		{"a file", "", []string{"--volumes=f"}, ""},
		{"kubectl, as JSON", "OXIDE_CLUSTER_ID", []string{"--kubectl", "--output=json"}, ""},
		{"all of it", "", append(slices.Clone(deleting), "--older-than=10m", "--min-interval=10m",
			"--assume-none=volumes,snapshots"), ""},
		{"neither", "", nil, "--kubectl"},
		{"both", "", []string{"--kubectl", "--volumes=f"}, "exactly one"},
		{"no rack", "OXIDE_HOST", []string{"--kubectl"}, "OXIDE_HOST"},
		{"no token", "OXIDE_TOKEN", []string{"--kubectl"}, "OXIDE_TOKEN"},
		{"no project", "OXIDE_PROJECT", []string{"--kubectl"}, "OXIDE_PROJECT"},
		{"deleting without memory", "", []string{"--kubectl", "--delete"}, "--state-file"},
		{"deleting without a cluster's id", "OXIDE_CLUSTER_ID", deleting, "OXIDE_CLUSTER_ID"},
		{"deleting what is young", "", append(slices.Clone(deleting), "--older-than=9m"), "10m"},
		{"deleting in haste", "", append(slices.Clone(deleting), "--min-interval=1s"), "10m"},
		{"deleting many", "", append(slices.Clone(deleting), "--at-most=500"), ""},
		{"deleting none", "", append(slices.Clone(deleting), "--at-most=0"), "--at-most"},
		{"what is not made yet", "", []string{"--kubectl", "--min-age=-1s"}, "--min-age"},
		{"another format", "", []string{"--kubectl", "--output=yaml"}, "table or json"},
		{"another kind", "", []string{"--kubectl", "--assume-none=pods"}, "volumes, snapshots"},
		{"a word too many", "", []string{"--kubectl", "now"}, "flags only"},
		{"a flag of the plugin's", "", []string{"--kubectl", "--mode=node"}, "mode"},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := parse(test.without, test.args...)
			switch {
			case test.want == "" && err != nil:
				t.Error(err)
			case test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)):
				t.Errorf("got %v, want %q", err, test.want)
			}
		})
	}
}
