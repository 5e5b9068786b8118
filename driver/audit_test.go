package driver

import (
	"bytes"
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
	for _, test := range []struct {
		name, without string
		args          []string
		want          string // a word of the error; empty: fine
	}{
		{"a file", "", []string{"--volumes=f"}, ""},
		{"kubectl, as JSON", "OXIDE_CLUSTER_ID", []string{"--kubectl", "--output=json"}, ""},
		{"deleting", "", []string{"--kubectl", "--delete=f", "--min-age=1h"}, ""},
		{"neither", "", nil, "--kubectl"},
		{"both", "", []string{"--kubectl", "--volumes=f"}, "exactly one"},
		{"no rack", "OXIDE_HOST", []string{"--kubectl"}, "OXIDE_HOST"},
		{"no token", "OXIDE_TOKEN", []string{"--kubectl"}, "OXIDE_TOKEN"},
		{"no project", "OXIDE_PROJECT", []string{"--kubectl"}, "OXIDE_PROJECT"},
		{"deleting by a list that may be half of it", "", []string{"--volumes=-", "--delete=f"},
			"needs --kubectl"},
		{"deleting without a cluster's id", "OXIDE_CLUSTER_ID", []string{"--kubectl", "--delete=f"},
			"OXIDE_CLUSTER_ID"},
		{"deleting what nobody names", "", []string{"--kubectl", "--delete"}, "needs an argument"},
		{"what is not made yet", "", []string{"--kubectl", "--min-age=-1s"}, "--min-age"},
		{"another format", "", []string{"--kubectl", "--output=yaml"}, "table or json"},
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
