package deploy_test

import (
	"slices"
	"strings"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	rbacv1 "k8s.io/api/rbac/v1"
)

const auditName = "oxide-csi-audit"

// audited returns the arguments for the chart with its audit.
func audited() []string {
	return with("audit.enabled=true", "audit.kubectlImage.repository=mine/kubectl",
		"audit.kubectlImage.tag=v1.35.4", "audit.extraArgs[0]=--output=json", "ownCA=true")
}

func TestTheAuditAcceptsTheArgumentsInTheChart(t *testing.T) {
	out, complaints, err := run(t, nil, program(t, "oxide-csi-plugin"), "audit", "--help")
	if err != nil || !strings.Contains(out, "--volumes FILE") {
		t.Errorf("the audit's help does not know --volumes (%v):\n%s%s", err, out, complaints)
	}
}

func TestAnAuditHasOnlyTheRightsThatItNeeds(t *testing.T) {
	always := []string{"persistentvolumes", "persistentvolumeclaims", "nodes", "volumeattachments",
		"csidrivers"}
	for _, c := range []struct {
		args []string
		want []string
	}{
		{audited(), always},
		{append(audited(), with("snapshots.enabled=true")...), append(slices.Clone(always),
			"volumesnapshots", "volumesnapshotcontents")},
	} {
		all := objects(t, c.args...)
		pod := find[batchv1.CronJob](t, all, "CronJob",
			auditName).Spec.JobTemplate.Spec.Template.Spec
		command := strings.Join(container(t, pod, "list").Command, " ")
		var got []string
		for _, rule := range find[rbacv1.ClusterRole](t, all, "ClusterRole", auditName).Rules {
			got = append(got, rule.Resources...)
			if !slices.Equal(rule.Verbs, []string{"list"}) || len(rule.Resources) != 1 {
				t.Errorf("the audit has the rule %v", rule)
			}
			if !strings.Contains(command, rule.Resources[0]) {
				t.Errorf("the audit may list %s, and runs %s", rule.Resources[0], command)
			}
		}
		if !slices.Equal(got, c.want) || strings.Count(command, ",") != len(c.want)-1 ||
			!strings.HasSuffix(command, " > /lists/wanted.json") {
			t.Errorf("the audit may list %q and runs %s, want %q", got, command, c.want)
		}
		for _, v := range container(t, pod, "list").Env {
			if strings.HasPrefix(v.Name, "OXIDE_") {
				t.Errorf("kubectl is given %s", v.Name)
			}
		}
	}
}
