package deploy_test

import (
	"os/exec"
	"slices"
	"strings"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
)

const auditName = "oxide-csi-audit"

// audited is the chart with its audit.
func audited() []string {
	return with("audit.enabled=true", "audit.kubectlImage.repository=mine/kubectl",
		"audit.kubectlImage.tag=v1.35.4", "audit.extraArgs[0]=--output=json", "ownCA=true")
}

func TestAnAuditComparesTheClustersVolumesWithTheRack(t *testing.T) {
	all := objects(t, audited()...)
	job := find[batchv1.CronJob](t, all, "CronJob", auditName)
	pod := job.Spec.JobTemplate.Spec.Template.Spec
	list, audit := container(t, pod, "list"), container(t, pod, "audit")
	if list.Image != "mine/kubectl:v1.35.4" || audit.Image != "oxidecomputer/oxide-csi-plugin:v0.1.0" {
		t.Errorf("the images are %s and %s", list.Image, audit.Image)
	}
	const file = "/lists/wanted.json"
	command := list.Command[len(list.Command)-1]
	want := []string{"audit", "--volumes=" + file, "--output=json"}
	if !slices.Equal(audit.Args, want) || !strings.HasSuffix(command, "> "+file) {
		t.Errorf("%q writes the list, and %q reads it; want %q", command, audit.Args, want)
	}
	if wrote, read := mountedAt(list, "/lists"), mountedAt(audit, "/lists"); wrote == nil ||
		read == nil || wrote.Name != read.Name || !read.ReadOnly {
		t.Errorf("the list is written to %v and read from %v", wrote, read)
	}
	controller, _ := plugins(t, all)
	for _, name := range []string{"OXIDE_HOST", "OXIDE_TOKEN", "OXIDE_TOKEN_FILE", "OXIDE_PROJECT",
		"OXIDE_CLUSTER_ID", "OXIDE_CA_FILE"} {
		if got, want := variable(t, audit, name), variable(t, controller, name); got.String() !=
			want.String() {
			t.Errorf("%s is %v, the controller's is %v", name, got, want)
		}
	}
	// Exit status 2 is a finding, which another attempt would not take away.
	if *job.Spec.JobTemplate.Spec.BackoffLimit != 0 ||
		pod.RestartPolicy != corev1.RestartPolicyNever ||
		job.Spec.ConcurrencyPolicy != batchv1.ForbidConcurrent ||
		job.Spec.Schedule != "17 3 * * *" {
		t.Errorf("the job is %v", job.Spec)
	}
	if n := len(objects(t).kinds("CronJob")); n != 0 {
		t.Errorf("by default there are %d cron jobs", n)
	}
}

func TestTheAuditKnowsItsArguments(t *testing.T) {
	out, complaints, err := finish(t, exec.CommandContext(t.Context(), "go", "run",
		"../cmd/oxide-csi-plugin", "audit", "--help"), nil)
	if err != nil || !strings.Contains(out, "--volumes FILE") {
		t.Errorf("the audit's help does not know --volumes (%v):\n%s%s", err, out, complaints)
	}
}

func TestAnAuditHasNoMorePowerThanItNeeds(t *testing.T) {
	for _, c := range []struct {
		args []string
		want []string
	}{
		{audited(), []string{"persistentvolumes", "persistentvolumeclaims"}},
		{append(audited(), with("snapshots.enabled=true")...), []string{"persistentvolumes",
			"persistentvolumeclaims", "volumesnapshots", "volumesnapshotcontents"}},
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
		if !slices.Equal(got, c.want) || strings.Count(command, ",") != len(c.want)-1 {
			t.Errorf("the audit may list %q and runs %s, want %q", got, command, c.want)
		}
		if *pod.AutomountServiceAccountToken || !*pod.SecurityContext.RunAsNonRoot ||
			pod.ServiceAccountName != auditName {
			t.Errorf("the pod is %v", pod)
		}
		for _, container := range containers(pod) {
			locked(t, container)
			if token := mountedAt(container, tokenPath) != nil; token != (container.Name == "list") {
				t.Errorf("%s has a token of Kubernetes: %v", container.Name, token)
			}
		}
		for _, v := range container(t, pod, "list").Env {
			if strings.HasPrefix(v.Name, "OXIDE_") {
				t.Errorf("kubectl is given %s", v.Name)
			}
		}
	}
}
